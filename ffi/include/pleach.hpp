// The C++ API of pleach: pleach.h with destructors, types of elements, and exceptions. C++17,
// header only.
//
// Every member function that fails throws pleach::Error, or pleach::CommunicatorError when the
// communicator has failed. Thread-safety and blocking are those of the functions of pleach.h with
// the same name.
#ifndef PLEACH_HPP
#define PLEACH_HPP

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#if __cplusplus >= 202002L
#include <span>
#endif
#if __cplusplus > 202002L && __has_include(<stdfloat>)
#include <stdfloat>
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
        throw Error(result, std::string(pleachGetErrorString(result)) + ": " + pleachGetLastError(nullptr));
}

// A limit as the functions take it.
inline std::uint64_t count(std::chrono::milliseconds limit) {
    if (limit.count() < 0) throw Error(pleachInvalidArgument, "a limit below zero");
    return static_cast<std::uint64_t>(limit.count());
}

// Calls a std::function with memory that the library holds no longer, and drops it.
template <typename T> void released(void *address, void *context) {
    std::unique_ptr<std::function<void(T *)>> given(static_cast<std::function<void(T *)> *>(context));
    if (*given) (*given)(static_cast<T *>(address));
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

// Elements of floating-point types that C++17 has no type for: their bits. A cast between these and
// the types of another library (__half, Eigen::bfloat16) keeps the bits.
struct Float16 { std::uint16_t bits; };   // IEEE binary16
struct BFloat16 { std::uint16_t bits; };  // the upper half of a float
struct Float8E4M3 { std::uint8_t bits; }; // 4 bits of exponent
struct Float8E5M2 { std::uint8_t bits; }; // 5 bits of exponent

// The number of an element type. Types of half width of other libraries: specialize it.
template <typename T> struct DataType;
template <> struct DataType<Float16> { static constexpr pleachDataType_t value = pleachFloat16; };
template <> struct DataType<BFloat16> { static constexpr pleachDataType_t value = pleachBfloat16; };
template <> struct DataType<Float8E4M3> { static constexpr pleachDataType_t value = pleachFloat8e4m3; };
template <> struct DataType<Float8E5M2> { static constexpr pleachDataType_t value = pleachFloat8e5m2; };
#ifdef __STDCPP_FLOAT16_T__
template <> struct DataType<std::float16_t> { static constexpr pleachDataType_t value = pleachFloat16; };
#endif
#ifdef __STDCPP_BFLOAT16_T__
template <> struct DataType<std::bfloat16_t> { static constexpr pleachDataType_t value = pleachBfloat16; };
#endif
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

// The version of the library that runs: 10000 * major + 100 * minor + patch.
inline int version() {
    int version = 0;
    detail::check(pleachGetVersion(&version));
    return version;
}

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

// Memory that is registered with a communicator, until the end of this object, which must end
// before the communicator.
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

// A sum that multiplies this rank's input first, for calls of one communicator, which must outlive
// this object.
class PremulSum {
public:
    PremulSum(PremulSum &&other) noexcept : comm_(std::exchange(other.comm_, nullptr)), op_(other.op_) {}
    PremulSum &operator=(PremulSum &&) = delete;
    ~PremulSum() {
        if (comm_ != nullptr) pleachRedOpDestroy(op_, comm_);
    }
    operator pleachRedOp_t() const noexcept { return op_; }

private:
    friend class Communicator;
    PremulSum(pleachComm_t comm, pleachRedOp_t op) noexcept : comm_(comm), op_(op) {}
    pleachComm_t comm_;
    pleachRedOp_t op_;
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
    Communicator split(int color, int key, const pleachConfig_t &config = default_config()) const {
        pleachComm_t part = nullptr;
        check(pleachCommSplit(get(), color, key, &part, &config));
        return Communicator(part);
    }
    explicit operator bool() const noexcept { return get() != nullptr; }
    void finalize() { check(pleachCommFinalize(get())); }
    void abort() { detail::check(pleachCommAbort(comm_.release())); }
    void set_timeout(std::chrono::milliseconds timeout) {
        detail::check(pleachCommSetTimeout(get(), detail::count(timeout)));
    }
    // Why it has failed; its kind is pleachFailureNone if it has not.
    pleachFailure_t failure() const {
        pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
        detail::check(pleachCommGetFailure(get(), &failure));
        return failure;
    }
    // pleachSuccess, or the result of the call that has failed for good.
    pleachResult_t async_error() const {
        pleachResult_t error = pleachSuccess;
        detail::check(pleachCommGetAsyncError(get(), &error));
        return error;
    }
    // The rank that a call of another thread waits for; -1 for none.
    int waits_for() const {
        int rank = -1;
        detail::check(pleachCommGetWaitsFor(get(), &rank));
        return rank;
    }
    pleachArrivalSkew_t arrival_skew(int peer) const {
        pleachArrivalSkew_t skew = PLEACH_ARRIVAL_SKEW_INITIALIZER;
        detail::check(pleachCommGetArrivalSkew(get(), peer, &skew));
        return skew;
    }
    template <typename T> Registration register_memory(T *data, std::size_t count) const {
        void *handle = nullptr;
        check(pleachCommRegister(get(), data, bytes<T>(count), &handle));
        return Registration(get(), handle);
    }
    // Memory that stays until `release` is called with its address, once, by any thread. `release`
    // does not throw, and calls no function of the library. If this function throws, `release` is
    // not called.
    template <typename T>
    Registration register_memory(T *data, std::size_t count, std::function<void(T *)> release) const {
        auto held = std::make_unique<std::function<void(T *)>>(std::move(release));
        void *handle = nullptr;
        check(pleachCommRegisterWithRelease(get(), data, bytes<T>(count), &detail::released<T>, held.get(), &handle));
        held.release();
        return Registration(get(), handle);
    }
    // Sums of the inputs, that of this rank times `factor`.
    template <typename T> PremulSum premul_sum(const T &factor) const {
        pleachRedOp_t op = pleachSum;
        check(pleachRedOpCreatePreMulSum(&op, &factor, DataType<T>::value, pleachScalarHostImmediate, get()));
        return PremulSum(get(), op);
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
        check(pleachBcast(data, count, DataType<T>::value, root, get(), nullptr));
    }
    // The input of the root; that of other ranks is ignored.
    template <typename T> void broadcast(const T *in, T *out, std::size_t count, int root) const {
        check(pleachBroadcast(in, out, count, DataType<T>::value, root, get(), nullptr));
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
    template <typename T>
    void reduce_scatter_v(const T *in, T *out, const std::vector<std::size_t> &counts, pleachRedOp_t op = pleachSum) const {
        expect_counts(counts);
        check(pleachReduceScatterV(in, out, counts.data(), DataType<T>::value, op, get(), nullptr));
    }
    template <typename T>
    void gather_v(const T *in, T *out, const std::vector<std::size_t> &counts, int root) const {
        expect_counts(counts);
        check(pleachGatherV(in, out, counts.data(), DataType<T>::value, root, get(), nullptr));
    }
    template <typename T>
    void scatter_v(const T *in, T *out, const std::vector<std::size_t> &counts, int root) const {
        expect_counts(counts);
        check(pleachScatterV(in, out, counts.data(), DataType<T>::value, root, get(), nullptr));
    }
    // What goes to each rank, and what comes from it.
    template <typename T>
    void all_to_all_v(const T *in, const std::vector<std::size_t> &send, T *out,
                      const std::vector<std::size_t> &receive) const {
        expect_counts(send);
        expect_counts(receive);
        check(pleachAlltoAllV(in, send.data(), out, receive.data(), DataType<T>::value, get(), nullptr));
    }
    template <typename T> void send(const T *data, std::size_t count, int peer) const {
        check(pleachSend(data, count, DataType<T>::value, peer, get(), nullptr));
    }
    template <typename T> void recv(T *data, std::size_t count, int peer) const {
        check(pleachRecv(data, count, DataType<T>::value, peer, get(), nullptr));
    }
    void barrier() const { check(pleachBarrier(get(), nullptr)); }

#if __cplusplus >= 202002L
    // The same on spans, whose lengths are compared. The output says the type of the elements; the
    // input may be anything that becomes a span of it. What a rank has no part of may be empty.
    template <typename T> using In = std::span<const std::type_identity_t<T>>;
    template <typename T> Registration register_memory(std::span<T> data) const {
        return register_memory(data.data(), data.size());
    }
    template <typename T> void all_reduce(std::span<T> data, pleachRedOp_t op = pleachSum) const {
        all_reduce(data.data(), data.size(), op);
    }
    template <typename T> void all_reduce(In<T> in, std::span<T> out, pleachRedOp_t op = pleachSum) const {
        expect_length(in.size(), out.size());
        all_reduce(in.data(), out.data(), out.size(), op);
    }
    template <typename T> void broadcast(std::span<T> data, int root) const {
        broadcast(data.data(), data.size(), root);
    }
    template <typename T> void broadcast(In<T> in, std::span<T> out, int root) const {
        if (rank() == root) expect_length(in.size(), out.size());
        broadcast(in.data(), out.data(), out.size(), root);
    }
    template <typename T> void reduce(In<T> in, std::span<T> out, int root, pleachRedOp_t op = pleachSum) const {
        if (rank() == root) expect_length(in.size(), out.size());
        reduce(in.data(), out.data(), in.size(), root, op);
    }
    template <typename T> void all_gather(In<T> in, std::span<T> out) const {
        expect_length(in.size(), block(out.size()));
        all_gather(in.data(), out.data(), in.size());
    }
    template <typename T> void reduce_scatter(In<T> in, std::span<T> out, pleachRedOp_t op = pleachSum) const {
        expect_length(block(in.size()), out.size());
        reduce_scatter(in.data(), out.data(), out.size(), op);
    }
    template <typename T> void all_to_all(In<T> in, std::span<T> out) const {
        expect_length(in.size(), out.size());
        all_to_all(in.data(), out.data(), block(in.size()));
    }
    template <typename T> void gather(In<T> in, std::span<T> out, int root) const {
        if (rank() == root) expect_length(in.size(), block(out.size()));
        gather(in.data(), out.data(), in.size(), root);
    }
    template <typename T> void scatter(In<T> in, std::span<T> out, int root) const {
        if (rank() == root) expect_length(block(in.size()), out.size());
        scatter(in.data(), out.data(), out.size(), root);
    }
    template <typename T>
    void all_gather_v(In<T> in, std::span<T> out, const std::vector<std::size_t> &counts) const {
        expect_length(in.size(), own(counts));
        expect_length(out.size(), sum(counts));
        all_gather_v(in.data(), out.data(), counts);
    }
    template <typename T>
    void reduce_scatter_v(In<T> in, std::span<T> out, const std::vector<std::size_t> &counts,
                          pleachRedOp_t op = pleachSum) const {
        expect_length(in.size(), sum(counts));
        expect_length(out.size(), own(counts));
        reduce_scatter_v(in.data(), out.data(), counts, op);
    }
    template <typename T>
    void gather_v(In<T> in, std::span<T> out, const std::vector<std::size_t> &counts, int root) const {
        expect_length(in.size(), own(counts));
        if (rank() == root) expect_length(out.size(), sum(counts));
        gather_v(in.data(), out.data(), counts, root);
    }
    template <typename T>
    void scatter_v(In<T> in, std::span<T> out, const std::vector<std::size_t> &counts, int root) const {
        if (rank() == root) expect_length(in.size(), sum(counts));
        expect_length(out.size(), own(counts));
        scatter_v(in.data(), out.data(), counts, root);
    }
    template <typename T>
    void all_to_all_v(In<T> in, const std::vector<std::size_t> &send, std::span<T> out,
                      const std::vector<std::size_t> &receive) const {
        expect_length(in.size(), sum(send));
        expect_length(out.size(), sum(receive));
        all_to_all_v(in.data(), send, out.data(), receive);
    }
    template <typename T> void send(std::span<T> data, int peer) const {
        send(static_cast<const T *>(data.data()), data.size(), peer);
    }
    template <typename T> void recv(std::span<T> data, int peer) const { recv(data.data(), data.size(), peer); }
#endif

private:
    friend class Session;
    explicit Communicator(pleachComm_t comm) noexcept : comm_(comm) {}
    void expect_counts(const std::vector<std::size_t> &counts) const {
        if (counts.size() != static_cast<std::size_t>(size()))
            throw Error(pleachInvalidArgument, "there must be one count for each rank");
    }
    static void expect_length(std::size_t one, std::size_t other) {
        if (one != other) throw Error(pleachInvalidArgument, "the lengths of the spans do not fit together");
    }
    // The elements of a block, of so many elements with a block for each rank.
    std::size_t block(std::size_t all) const {
        const auto ranks = static_cast<std::size_t>(size());
        expect_length(all % ranks, 0);
        return all / ranks;
    }
    std::size_t own(const std::vector<std::size_t> &counts) const {
        expect_counts(counts);
        return counts[static_cast<std::size_t>(rank())];
    }
    static std::size_t sum(const std::vector<std::size_t> &counts) {
        std::size_t sum = 0;
        for (std::size_t count : counts) sum += count;
        return sum;
    }
    template <typename T> static std::size_t bytes(std::size_t count) {
        if (count > SIZE_MAX / sizeof(T)) throw Error(pleachInvalidArgument, "too many elements");
        return count * sizeof(T);
    }
    void check(pleachResult_t result) const {
        if (result == pleachSuccess) return;
        const std::string text = std::string(pleachGetErrorString(result)) + ": " + pleachGetLastError(nullptr);
        pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
        if (pleachCommGetFailure(get(), &failure) == pleachSuccess && failure.kind != pleachFailureNone)
            throw CommunicatorError(result, failure);
        throw Error(result, text);
    }
    using Owned = detail::Owner<pleachComm_t, &pleachCommDestroy>;
    Owned comm_;
};

// Calls of this thread between its begin and its end are carried out together. A group that is left
// by an exception is ended, and its failure is dropped.
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

// Elements that are registered with a device, until the end of this object. It may outlive its
// device.
template <typename T> class Region {
public:
    T *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return count_; }
    T *begin() const noexcept { return data_; }
    T *end() const noexcept { return data_ + count_; }
    T &operator[](std::size_t index) const noexcept { return data_[index]; }
    pleachRegion_t get() const noexcept { return region_.get(); }
    // The name of `count` elements from `first` on, for other ranks.
    pleachRemoteSlice_t name(std::size_t first, std::size_t count) const {
        if (first > count_ || count > count_ - first)
            throw Error(pleachInvalidArgument, "the part does not lie inside of the region");
        pleachRemoteSlice_t slice = {0, 0, 0};
        detail::check(pleachRegionExport(get(), first * sizeof(T), count * sizeof(T), &slice));
        return slice;
    }
    pleachRemoteSlice_t name() const { return name(0, count_); }

private:
    friend class Device;
    Region(pleachRegion_t region, T *data, std::size_t count) noexcept : region_(region), data_(data), count_(count) {}
    detail::Owner<pleachRegion_t, &pleachRegionRelease> region_;
    T *data_;
    std::size_t count_;
};

// An operation on a peer. Ask for its end with `wait`: a device keeps the ends of 65536 that were
// not asked for.
class [[nodiscard]] Transfer {
public:
    // Throws Error with pleachTimeout if it is still under way. Returns the old value of an atomic
    // operation.
    std::uint64_t wait(std::chrono::milliseconds limit) const {
        std::uint64_t old = 0;
        detail::check(pleachTransferWait(device_, number_, detail::count(limit), &old));
        return old;
    }

private:
    friend class Device;
    Transfer(pleachDevice_t device, pleachTransfer_t number) noexcept : device_(device), number_(number) {}
    pleachDevice_t device_;
    pleachTransfer_t number_;
};

// A signal slot of a peer, with bytes beside the signal.
struct Signal {
    int slot = PLEACH_NO_SIGNAL;
    const void *payload = nullptr;
    std::size_t bytes = 0;
};

// The bytes beside a signal.
using Payload = std::array<unsigned char, PLEACH_PAYLOAD_BYTES>;

// The transport below the collectives: one-sided transfers between registered memory. The
// destructor closes it.
class Device {
public:
    Device(int ranks, const pleachUniqueId &id, int rank, const pleachConfig_t &config = default_config()) {
        pleachDevice_t device = nullptr;
        detail::check(pleachDeviceOpen(&device, ranks, id, rank, &config));
        device_ = Owned(device);
    }
    // Among the ranks that the launcher of this process describes.
    static Device from_environment(const pleachConfig_t &config = default_config()) {
        pleachDevice_t device = nullptr;
        detail::check(pleachDeviceOpenFromEnv(&device, &config));
        return Device(device);
    }
    pleachDevice_t get() const noexcept { return device_.get(); }
    pleachDeviceInfo_t info() const {
        pleachDeviceInfo_t info = PLEACH_DEVICE_INFO_INITIALIZER;
        detail::check(pleachDeviceGetInfo(get(), &info));
        return info;
    }
    int rank() const { return info().rank; }
    int size() const { return info().nranks; }
    // The destructor drops the error that this function throws.
    void close() { detail::check(pleachDeviceClose(device_.release())); }

    // The values of all ranks, in rank order.
    template <typename T> std::vector<T> exchange(const T &own) const {
        static_assert(std::is_trivially_copyable<T>::value, "its bytes are sent");
        static_assert(sizeof(T) <= PLEACH_EXCHANGE_BYTES, "an exchange is not for data");
        std::vector<T> all(static_cast<std::size_t>(size()));
        detail::check(pleachDeviceExchange(get(), &own, all.data(), sizeof(T)));
        return all;
    }
    // Returns when all ranks have called it.
    void barrier() const { detail::check(pleachDeviceExchange(get(), nullptr, nullptr, 0)); }

    // `count` zeroed elements.
    template <typename T> Region<T> allocate(std::size_t count) const {
        expect_elements<T>(count);
        void *address = nullptr;
        pleachRegion_t region = nullptr;
        detail::check(pleachRegionAlloc(get(), count * sizeof(T), &address, &region));
        return Region<T>(region, static_cast<T *>(address), count);
    }
    // Memory of the caller's, which stays until `release` is called with its address, by any
    // thread. `release` does not throw. Not over "shm". If this function throws, `release` is not
    // called.
    template <typename T>
    Region<T> register_memory(T *data, std::size_t count, std::function<void(T *)> release) const {
        expect_elements<T>(count);
        auto held = std::make_unique<std::function<void(T *)>>(std::move(release));
        pleachRegion_t region = nullptr;
        detail::check(
            pleachRegionRegister(get(), data, count * sizeof(T), &detail::released<T>, held.get(), &region));
        held.release();
        return Region<T>(region, data, count);
    }

    // Elements of a region to a peer's memory of the same length, then a signal there.
    template <typename T>
    Transfer put(int peer, const Region<T> &from, std::size_t first, std::size_t count, const pleachRemoteSlice_t &to,
                 const Signal &signal = {}) const {
        pleachTransfer_t transfer = 0;
        expect_part(from, first, count);
        detail::check(pleachPut(get(), peer, from.get(), first * sizeof(T), count * sizeof(T), &to, signal.slot,
                                signal.payload, signal.bytes, &transfer));
        return Transfer(get(), transfer);
    }
    // A peer's memory into elements of a region.
    template <typename T>
    Transfer get_from(int peer, const pleachRemoteSlice_t &from, const Region<T> &to, std::size_t first,
                      std::size_t count) const {
        pleachTransfer_t transfer = 0;
        expect_part(to, first, count);
        detail::check(pleachGet(get(), peer, &from, to.get(), first * sizeof(T), count * sizeof(T), &transfer));
        return Transfer(get(), transfer);
    }
    Transfer atomic_add(int peer, const pleachRemoteSlice_t &word, std::uint64_t value) const {
        pleachTransfer_t transfer = 0;
        detail::check(pleachAtomicAdd(get(), peer, &word, value, &transfer));
        return Transfer(get(), transfer);
    }
    Transfer atomic_compare_swap(int peer, const pleachRemoteSlice_t &word, std::uint64_t expected,
                                 std::uint64_t desired) const {
        pleachTransfer_t transfer = 0;
        detail::check(pleachAtomicCompareSwap(get(), peer, &word, expected, desired, &transfer));
        return Transfer(get(), transfer);
    }
    void signal(int peer, const Signal &signal) const {
        detail::check(pleachSignal(get(), peer, signal.slot, signal.payload, signal.bytes, nullptr));
    }
    // Waits until a slot has received `count` signals of a peer; returns the bytes beside the last
    // one.
    Payload wait_for_signal(int peer, int slot, std::uint64_t count, std::chrono::milliseconds limit) const {
        Payload payload = {};
        detail::check(pleachSignalWait(get(), peer, slot, count, detail::count(limit), payload.data()));
        return payload;
    }
    std::uint64_t signal_count(int peer, int slot) const {
        std::uint64_t count = 0;
        detail::check(pleachSignalCount(get(), peer, slot, &count));
        return count;
    }

private:
    explicit Device(pleachDevice_t device) noexcept : device_(device) {}
    template <typename T> static void expect_elements(std::size_t count) {
        static_assert(std::is_trivially_copyable<T>::value, "its bytes are moved");
        if (count > SIZE_MAX / sizeof(T)) throw Error(pleachInvalidArgument, "too many elements");
    }
    template <typename T> static void expect_part(const Region<T> &region, std::size_t first, std::size_t count) {
        if (first > region.size() || count > region.size() - first)
            throw Error(pleachInvalidArgument, "the part does not lie inside of the region");
    }
    using Owned = detail::Owner<pleachDevice_t, &pleachDeviceClose>;
    Owned device_;
};

} // namespace pleach

#include "pleach_exchange.hpp"
#include "pleach_partial.hpp"
#include "pleach_session.hpp"
#include "pleach_window.hpp"

#endif // PLEACH_HPP
