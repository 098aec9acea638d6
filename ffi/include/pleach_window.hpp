// The C++ API of windows, which pleach.hpp includes.
#ifndef PLEACH_WINDOW_HPP
#define PLEACH_WINDOW_HPP

#include <cstring>
#include <exception>

#include "pleach.hpp"

namespace pleach {

// A word whose first bytes are those of a number or a struct.
template <typename T> pleachWord_t word(const T &value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= PLEACH_WORD_BYTES, "a word has 48 bytes");
    pleachWord_t word = {};
    std::memcpy(word.bytes, &value, sizeof value);
    return word;
}
// The opposite.
template <typename T> T value_of(const pleachWord_t &word) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= PLEACH_WORD_BYTES, "a word has 48 bytes");
    T value;
    std::memcpy(&value, word.bytes, sizeof value);
    return value;
}

// A write of a peer, while the function that polls is called with it.
template <typename T> class Arrival {
public:
    int source() const noexcept { return arrival_->source; }
    int slot() const noexcept { return arrival_->slot; }
    const pleachWord_t &word() const noexcept { return arrival_->word; }
    const T *data() const noexcept { return static_cast<const T *>(arrival_->data); }
    std::size_t size() const noexcept { return arrival_->count; }
    const T *begin() const noexcept { return data(); }
    const T *end() const noexcept { return data() + size(); }
    const T &operator[](std::size_t index) const noexcept { return data()[index]; }

private:
    template <typename> friend class Window;
    explicit Arrival(const pleachArrival_t *arrival) noexcept : arrival_(arrival) {}
    const pleachArrival_t *arrival_;
};

// Memory that ranks read and write without each other's calls; its destructor destroys it. All
// ranks must hold theirs until none reads or writes any more: see finalize. The communicator may
// end before.
template <typename T> class Window {
public:
    Window(const Communicator &comm, std::size_t count, int slots = 1) : count_(count) {
        pleachWindow_t window = nullptr;
        detail::check(pleachWindowInit(&window, count, DataType<T>::value, slots, comm.get()));
        window_ = Owned(window);
    }
    pleachWindow_t get() const noexcept { return window_.get(); }
    std::size_t size() const noexcept { return count_; }
    // Publishes `size()` elements and returns the number of the version.
    std::uint64_t publish(const T *data, const pleachWord_t &word = {}) {
        std::uint64_t version = 0;
        detail::check(pleachWindowPublish(get(), data, &word, &version));
        return version;
    }
    // A version, and its word.
    struct Version {
        std::uint64_t number;
        pleachWord_t word;
    };
    // Reads `count` elements of a peer from element `first` on, all of one version.
    Version read(int peer, std::size_t first, std::size_t count, T *into) {
        Version version = {};
        detail::check(pleachWindowRead(get(), peer, first, count, into, &version.number, &version.word));
        return version;
    }
    // Any bytes, of this version and of newer ones.
    std::uint64_t read_torn(int peer, std::size_t first, std::size_t count, T *into) {
        std::uint64_t version = 0;
        detail::check(pleachWindowReadTorn(get(), peer, first, count, into, &version));
        return version;
    }
    bool is_free(int peer, int slot) {
        int is_free = 0;
        detail::check(pleachWindowIsFree(get(), peer, slot, &is_free));
        return is_free != 0;
    }
    void write(int peer, int slot, const T *data, std::size_t count, const pleachWord_t &word = {}) {
        detail::check(pleachWindowWrite(get(), peer, slot, data, count, &word));
    }
    // Calls `arrived` with each write that has come, an Arrival<T>; waits for one up to `timeout`.
    // Returns how many there were. The first exception of `arrived` is thrown when all have been
    // seen.
    template <typename Function>
    std::size_t poll(Function &&arrived, std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) {
        Polled<std::remove_reference_t<Function>> polled = {&arrived, nullptr};
        std::size_t count = 0;
        const auto show = [](const pleachArrival_t *arrival, void *context) {
            auto *called = static_cast<Polled<std::remove_reference_t<Function>> *>(context);
            try {
                (*called->function)(Arrival<T>(arrival));
            } catch (...) {
                if (!called->thrown) called->thrown = std::current_exception();
            }
        };
        detail::check(pleachWindowPoll(get(), detail::count(timeout), show, &polled, &count));
        if (polled.thrown) std::rethrow_exception(polled.thrown);
        return count;
    }
    // When this rank neither reads nor writes any more; all ranks call it.
    void finalize() { detail::check(pleachWindowFinalize(get())); }

private:
    template <typename Function> struct Polled {
        Function *function;
        std::exception_ptr thrown;
    };
    using Owned = detail::Owner<pleachWindow_t, &pleachWindowDestroy>;
    Owned window_;
    std::size_t count_;
};

} // namespace pleach

#endif // PLEACH_WINDOW_HPP
