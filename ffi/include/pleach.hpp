// The C++ API of pleach: pleach.h with destructors, types of elements, and exceptions. C++17, header only.
//
// Every member function that fails throws pleach::Error, or pleach::CommunicatorError when the communicator has
// failed. Thread-safety and blocking are those of the functions of pleach.h with the same name.
#ifndef PLEACH_HPP
#define PLEACH_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>
#if __cplusplus >= 202002L
#include <span>
#endif

#include "pleach.h"

namespace pleach {

// A function has failed.
class Error : public std::runtime_error {
public:
    Error(pleachResult_t result, const std::string &text) : std::runtime_error(text), result_(result) {}
    pleachResult_t result() const noexcept { return result_; }

private:
    pleachResult_t result_;
};

// A communicator has failed for good: why, and because of which rank.
class CommunicatorError : public Error {
public:
    CommunicatorError(pleachResult_t result, const pleachFailure_t &failure)
        : Error(result, failure.text), failure_(failure) {}
    const pleachFailure_t &failure() const noexcept { return failure_; }

private:
    pleachFailure_t failure_;
};

namespace detail {

inline void check(pleachResult_t result) {
    if (result != pleachSuccess)
        throw Error(result, std::string(pleachGetErrorString(result)) + ": " + pleachGetLastError());
}

// Closes a handle in its destructor.
template <typename Handle, pleachResult_t (*close)(Handle)>
class Owner {
public:
    Owner() = default;
    explicit Owner(Handle handle) noexcept : handle_(handle) {}
    Owner(Owner &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Owner &operator=(Owner &&other) noexcept {
        if (this != &other) {
            reset();
            handle_ = std::exchange(other.handle_, nullptr);
        }
        return *this;
    }
    ~Owner() { reset(); }
    Handle get() const noexcept { return handle_; }
    Handle release() noexcept { return std::exchange(handle_, nullptr); }
    void reset() noexcept {
        if (handle_ != nullptr) close(std::exchange(handle_, nullptr));
    }

private:
    Handle handle_ = nullptr;
};

} // namespace detail

// The number of an element type. Types of half width of other libraries: specialize it.
template <typename T> struct DataType;
template <> struct DataType<std::int8_t> { static constexpr pleachDataType_t value = pleachInt8; };
template <> struct DataType<std::uint8_t> { static constexpr pleachDataType_t value = pleachUint8; };
template <> struct DataType<std::int16_t> { static constexpr pleachDataType_t value = pleachInt16; };
template <> struct DataType<std::uint16_t> { static constexpr pleachDataType_t value = pleachUint16; };
template <> struct DataType<std::int32_t> { static constexpr pleachDataType_t value = pleachInt32; };
template <> struct DataType<std::uint32_t> { static constexpr pleachDataType_t value = pleachUint32; };
template <> struct DataType<std::int64_t> { static constexpr pleachDataType_t value = pleachInt64; };
template <> struct DataType<std::uint64_t> { static constexpr pleachDataType_t value = pleachUint64; };
template <> struct DataType<float> { static constexpr pleachDataType_t value = pleachFloat32; };
template <> struct DataType<double> { static constexpr pleachDataType_t value = pleachFloat64; };

inline pleachUniqueId unique_id() {
    pleachUniqueId id;
    detail::check(pleachGetUniqueId(&id));
    return id;
}

inline pleachConfig_t default_config() { return PLEACH_CONFIG_INITIALIZER; }

// `count` elements of memory that every fabric can register.
template <typename T> class Memory {
public:
    explicit Memory(std::size_t count) : count_(count) {
        if (count > SIZE_MAX / sizeof(T)) throw Error(pleachInvalidArgument, "too many elements");
        void *address = nullptr;
        detail::check(pleachMemAlloc(&address, count * sizeof(T)));
        owner_ = Owned(static_cast<T *>(address));
    }
    T *data() const noexcept { return owner_.get(); }
    std::size_t size() const noexcept { return count_; }
    T *begin() const noexcept { return data(); }
    T *end() const noexcept { return data() + count_; }
    T &operator[](std::size_t index) const noexcept { return data()[index]; }

private:
    static pleachResult_t free(T *address) { return pleachMemFree(address); }
    using Owned = detail::Owner<T *, &Memory::free>;
    Owned owner_;
    std::size_t count_;
};

class Communicator;

// Memory that is registered with a communicator, until the end of this object, which must end before the communicator.
class Registration {
public:
    Registration(Registration &&other) noexcept
        : comm_(std::exchange(other.comm_, nullptr)), handle_(std::exchange(other.handle_, nullptr)) {}
    Registration &operator=(Registration &&) = delete;
    ~Registration() {
        if (comm_ != nullptr) pleachCommDeregister(comm_, handle_);
    }

private:
    friend class Communicator;
    Registration(pleachComm_t comm, void *handle) noexcept : comm_(comm), handle_(handle) {}
    pleachComm_t comm_;
    void *handle_;
};

// A communicator; its destructor destroys it.
class Communicator {
public:
    Communicator(int ranks, const pleachUniqueId &id, int rank, const pleachConfig_t &config = default_config()) {
        pleachComm_t comm = nullptr;
        detail::check(pleachCommInitRankConfig(&comm, ranks, id, rank, &config));
        comm_ = Owned(comm);
    }
    // Among the ranks that the launcher of this process describes.
    static Communicator from_environment(const pleachConfig_t &config = default_config()) {
        pleachComm_t comm = nullptr;
        detail::check(pleachCommInitFromEnv(&comm, &config));
        return Communicator(comm);
    }

    pleachComm_t get() const noexcept { return comm_.get(); }
    int rank() const {
        int rank = -1;
        detail::check(pleachCommUserRank(get(), &rank));
        return rank;
    }
    int size() const {
        int count = 0;
        detail::check(pleachCommCount(get(), &count));
        return count;
    }
    // A part of the ranks: those that pass the same colour. Empty for PLEACH_SPLIT_NOCOLOR.
    Communicator split(int color, int key) const {
        pleachComm_t part = nullptr;
        check(pleachCommSplit(get(), color, key, &part));
        return Communicator(part);
    }
    explicit operator bool() const noexcept { return get() != nullptr; }
    void finalize() { check(pleachCommFinalize(get())); }
    void abort() { detail::check(pleachCommAbort(comm_.release())); }
    void set_timeout(std::chrono::milliseconds timeout) {
        if (timeout.count() < 0) throw Error(pleachInvalidArgument, "a timeout below zero");
        detail::check(pleachCommSetTimeout(get(), static_cast<std::uint64_t>(timeout.count())));
    }
    // Why it has failed; its kind is pleachFailureNone if it has not.
    pleachFailure_t failure() const {
        pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
        detail::check(pleachCommGetFailure(get(), &failure));
        return failure;
    }
    pleachArrivalSkew_t arrival_skew(int peer) const {
        pleachArrivalSkew_t skew = PLEACH_ARRIVAL_SKEW_INITIALIZER;
        detail::check(pleachCommGetArrivalSkew(get(), peer, &skew));
        return skew;
    }
    template <typename T> Registration register_memory(T *data, std::size_t count) const {
        void *handle = nullptr;
        check(pleachCommRegister(get(), data, count * sizeof(T), &handle));
        return Registration(get(), handle);
    }

    // In place.
    template <typename T> void all_reduce(T *data, std::size_t count, pleachRedOp_t op = pleachSum) const {
        all_reduce(data, data, count, op);
    }
    template <typename T>
    void all_reduce(const T *in, T *out, std::size_t count, pleachRedOp_t op = pleachSum) const {
        check(pleachAllReduce(in, out, count, DataType<T>::value, op, get(), nullptr));
    }
    template <typename T> void broadcast(T *data, std::size_t count, int root) const {
        check(pleachBroadcast(data, data, count, DataType<T>::value, root, get(), nullptr));
    }
    template <typename T>
    void reduce(const T *in, T *out, std::size_t count, int root, pleachRedOp_t op = pleachSum) const {
        check(pleachReduce(in, out, count, DataType<T>::value, op, root, get(), nullptr));
    }
    // `count` elements of each rank go to each rank.
    template <typename T> void all_gather(const T *in, T *out, std::size_t count) const {
        check(pleachAllGather(in, out, count, DataType<T>::value, get(), nullptr));
    }
    // `count` elements of the result stay on each rank.
    template <typename T>
    void reduce_scatter(const T *in, T *out, std::size_t count, pleachRedOp_t op = pleachSum) const {
        check(pleachReduceScatter(in, out, count, DataType<T>::value, op, get(), nullptr));
    }
    template <typename T> void all_to_all(const T *in, T *out, std::size_t count) const {
        check(pleachAlltoAll(in, out, count, DataType<T>::value, get(), nullptr));
    }
    template <typename T> void gather(const T *in, T *out, std::size_t count, int root) const {
        check(pleachGather(in, out, count, DataType<T>::value, root, get(), nullptr));
    }
    template <typename T> void scatter(const T *in, T *out, std::size_t count, int root) const {
        check(pleachScatter(in, out, count, DataType<T>::value, root, get(), nullptr));
    }
    // One element of `counts` for each rank.
    template <typename T> void all_gather_v(const T *in, T *out, const std::vector<std::size_t> &counts) const {
        expect_counts(counts);
        check(pleachAllGatherV(in, out, counts.data(), DataType<T>::value, get(), nullptr));
    }
    template <typename T> void send(const T *data, std::size_t count, int peer) const {
        check(pleachSend(data, count, DataType<T>::value, peer, get(), nullptr));
    }
    template <typename T> void recv(T *data, std::size_t count, int peer) const {
        check(pleachRecv(data, count, DataType<T>::value, peer, get(), nullptr));
    }
    void barrier() const { check(pleachBarrier(get(), nullptr)); }

#if __cplusplus >= 202002L
    template <typename T> void all_reduce(std::span<T> data, pleachRedOp_t op = pleachSum) const {
        all_reduce(data.data(), data.size(), op);
    }
    template <typename T> void broadcast(std::span<T> data, int root) const {
        broadcast(data.data(), data.size(), root);
    }
    template <typename T> void send(std::span<const T> data, int peer) const { send(data.data(), data.size(), peer); }
    template <typename T> void recv(std::span<T> data, int peer) const { recv(data.data(), data.size(), peer); }
#endif

private:
    explicit Communicator(pleachComm_t comm) noexcept : comm_(comm) {}
    void expect_counts(const std::vector<std::size_t> &counts) const {
        if (counts.size() != static_cast<std::size_t>(size()))
            throw Error(pleachInvalidArgument, "there must be one count for each rank");
    }
    void check(pleachResult_t result) const {
        if (result == pleachSuccess) return;
        const std::string text = std::string(pleachGetErrorString(result)) + ": " + pleachGetLastError();
        pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
        if (pleachCommGetFailure(get(), &failure) == pleachSuccess && failure.kind != pleachFailureNone)
            throw CommunicatorError(result, failure);
        throw Error(result, text);
    }
    using Owned = detail::Owner<pleachComm_t, &pleachCommDestroy>;
    Owned comm_;
};

// Calls of this thread between its begin and its end are carried out together. A group that is left by an exception is
// ended, and its failure is dropped.
template <typename Calls> void grouped(Calls &&calls) {
    detail::check(pleachGroupStart());
    try {
        std::forward<Calls>(calls)();
    } catch (...) {
        pleachGroupEnd();
        throw;
    }
    detail::check(pleachGroupEnd());
}

} // namespace pleach

#endif // PLEACH_HPP
