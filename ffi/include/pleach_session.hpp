// The C++ API of sessions, which pleach.hpp includes.
#ifndef PLEACH_SESSION_HPP
#define PLEACH_SESSION_HPP

#include <exception>

#include "pleach.hpp"

namespace pleach {

// Steps are made by `fewest` members or more; there are at most `most`.
inline pleachElastic_t elastic(std::uint32_t fewest, std::uint32_t most) {
    pleachElastic_t elastic = PLEACH_ELASTIC_INITIALIZER;
    elastic.fewest = fewest;
    elastic.most = most;
    return elastic;
}

// This process's membership in a job whose processes come and go; its destructor ends it without
// leaving, which is to the others as the end of the process.
class Session {
public:
    // Joins as the launcher of this process says.
    explicit Session(const pleachElastic_t &elastic, const pleachConfig_t &config = default_config()) {
        pleachSession_t session = nullptr;
        detail::check(pleachSessionJoinFromEnv(&session, &elastic, &config));
        session_ = Owned(session);
    }
    Session(int ranks, const pleachUniqueId &id, int rank, const pleachElastic_t &elastic,
            const pleachConfig_t &config = default_config()) {
        pleachSession_t session = nullptr;
        detail::check(pleachSessionJoin(&session, ranks, id, rank, &elastic, &config));
        session_ = Owned(session);
    }
    pleachSession_t get() const noexcept { return session_.get(); }
    pleachSessionInfo_t info() const {
        pleachSessionInfo_t info = PLEACH_SESSION_INFO_INITIALIZER;
        detail::check(pleachSessionGetInfo(get(), &info));
        return info;
    }
    std::uint64_t step() const { return info().step; }
    int seat() const { return info().seat; }
    // Declares a state of `count` elements that are equal on all members. Ask for its address when
    // the first step has begun: who joins a running job has read it then.
    template <typename T> T *state(const char *name, std::size_t count) {
        void *data = nullptr;
        detail::check(pleachSessionState(get(), name, count, DataType<T>::value, &data));
        return static_cast<T *>(data);
    }
    // Where the elements of a state are now.
    template <typename T> T *state(const char *name) const {
        void *data = nullptr;
        detail::check(pleachSessionGetState(get(), name, &data));
        return static_cast<T *>(data);
    }
    // `count` zeroed elements, registered for all epochs, until free_buffer or the end of this
    // object.
    template <typename T> T *buffer(std::size_t count) {
        if (count > SIZE_MAX / sizeof(T)) throw Error(pleachInvalidArgument, "too many elements");
        void *data = nullptr;
        detail::check(pleachSessionBuffer(get(), count * sizeof(T), &data));
        return static_cast<T *>(data);
    }
    template <typename T> void free_buffer(T *data) { detail::check(pleachSessionFreeBuffer(get(), data)); }
    // Attempts the next step: calls `attempt` with the communicator of this epoch and the number of
    // the step, and returns the verdict of all members. If `attempt` throws, the step was not done
    // here, and is repeated. After too many times in a row the exception is thrown here.
    template <typename Function> pleachVerdict_t attempt(Function &&attempt) {
        pleachVerdict_t verdict = PLEACH_VERDICT_INITIALIZER;
        std::uint64_t step = 0;
        pleachComm_t comm = nullptr;
        detail::check(pleachSessionNext(get(), &step, &comm));
        std::exception_ptr thrown;
        bool is_own = true;
        Communicator epoch(comm);
        try {
            attempt(static_cast<const Communicator &>(epoch), step);
        } catch (const CommunicatorError &error) {
            is_own = error.failure().kind != pleachFailureChanged;
            thrown = std::current_exception();
        } catch (...) {
            thrown = std::current_exception();
        }
        // It belongs to the session.
        (void)epoch.comm_.release();
        const pleachResult_t result = pleachSessionCommit(get(), thrown ? -1 : pleachSuccess, &verdict);
        if (result == pleachStepFailed && thrown && is_own) std::rethrow_exception(thrown);
        detail::check(result);
        return verdict;
    }
    // One of the lists of the last change that a call has told.
    std::vector<pleachMember_t> change(int list) const {
        std::size_t count = 0;
        detail::check(pleachSessionGetChange(get(), list, nullptr, 0, &count));
        std::vector<pleachMember_t> members(count);
        detail::check(pleachSessionGetChange(get(), list, members.data(), members.size(), &count));
        return members;
    }
    // Divides the members of each epoch by a colour for each seat, PLEACH_SPLIT_NOCOLOR for none;
    // for split_comm.
    int split(const std::vector<int> &colors) {
        int split = -1;
        detail::check(pleachSessionSplit(get(), colors.data(), colors.size(), &split));
        return split;
    }
    // The communicator of this process's part, while a step is attempted: the session's, or NULL.
    pleachComm_t split_comm(int split) const {
        pleachComm_t comm = nullptr;
        detail::check(pleachSessionGetSplit(get(), split, &comm));
        return comm;
    }
    void audit() { detail::check(pleachSessionAudit(get())); }
    void leave_on(int signal) { detail::check(pleachSessionLeaveOn(get(), signal)); }
    void leave_after_step() { detail::check(pleachSessionLeaveAfterStep(get())); }
    // Memory of buffers and states stays until the end of this object.
    void leave() { detail::check(pleachSessionLeave(get())); }

private:
    using Owned = detail::Owner<pleachSession_t, &pleachSessionDestroy>;
    Owned session_;
};

} // namespace pleach

#endif // PLEACH_SESSION_HPP
