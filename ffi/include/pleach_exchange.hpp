// The C++ API of the tensor exchange, which pleach.hpp includes: tensors by key between programs.
#ifndef PLEACH_EXCHANGE_HPP
#define PLEACH_EXCHANGE_HPP

#include "pleach.hpp"

namespace pleach {

// A tensor was not sent or received: which one, from whom, and why.
class ExchangeError : public Error {
public:
    ExchangeError(pleachResult_t result, const pleachExchangeFailure_t &failure)
        : Error(result, failure.text), failure_(failure) {}
    const pleachExchangeFailure_t &failure() const noexcept { return failure_; }
    // pleachExchangeTimeout to pleachExchangeCancelled.
    int kind() const noexcept { return failure_.kind; }

private:
    pleachExchangeFailure_t failure_;
};

namespace detail {

// The failure of a call that sends or receives, if it is the one that the thread keeps.
inline bool exchange_failure(pleachResult_t result, pleachExchangeFailure_t &failure) {
    return pleachGetLastExchangeFailure(&failure) == pleachSuccess && failure.kind != pleachExchangeNone
           && failure.result == static_cast<int>(result)
           && std::string(pleachGetLastError(nullptr)).compare(0, PLEACH_FAILURE_BYTES - 1, failure.text) == 0;
}

inline void check_exchange(pleachResult_t result) {
    if (result == pleachSuccess) return;
    pleachExchangeFailure_t failure = PLEACH_EXCHANGE_FAILURE_INITIALIZER;
    if (exchange_failure(result, failure)) throw ExchangeError(result, failure);
    check(result);
}

} // namespace detail

// The type and the dimensions of a tensor, the slowest first.
struct Shape {
    pleachDataType_t datatype;
    std::vector<std::size_t> dims;
    bool operator==(const Shape &other) const { return datatype == other.datatype && dims == other.dims; }
    bool operator!=(const Shape &other) const { return !(*this == other); }
};

// A tensor that was received, for reading; its destructor gives the memory back to the sender. It
// may outlive its endpoint.
class ReceivedTensor {
public:
    explicit ReceivedTensor(pleachTensor_t tensor) : tensor_(tensor) {
        detail::check(pleachTensorGetInfo(tensor, &info_));
    }
    pleachTensor_t get() const noexcept { return tensor_.get(); }
    Shape shape() const { return {info_.datatype, std::vector<std::size_t>(info_.dims, info_.dims + info_.ndim)}; }
    // pleachTensorInPlace, pleachTensorInline or pleachTensorLocal.
    int way() const noexcept { return info_.way; }
    const void *data() const noexcept { return info_.data; }
    std::size_t bytes() const noexcept { return info_.bytes; }
    // Its elements, which must have this type; `count` of them.
    template <typename T> const T *elements() const {
        if (DataType<T>::value != info_.datatype)
            throw Error(pleachInvalidArgument, "the tensor has elements of another type");
        return static_cast<const T *>(info_.data);
    }
    template <typename T> std::size_t count() const noexcept { return info_.bytes / sizeof(T); }
#if __cplusplus >= 202002L
    template <typename T> std::span<const T> span() const { return {elements<T>(), count<T>()}; }
#endif

private:
    detail::Owner<pleachTensor_t, &pleachTensorRelease> tensor_;
    pleachTensorInfo_t info_ = PLEACH_TENSOR_INFO_INITIALIZER;
};

// A tensor in lendable memory, for the caller to write until it is sent. A tensor that was sent
// stays for its receivers after the end of this object.
template <typename T> class Tensor {
public:
    pleachTensor_t get() const noexcept { return tensor_.get(); }
    T *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return count_; }
    T *begin() const noexcept { return data_; }
    T *end() const noexcept { return data_ + count_; }
    T &operator[](std::size_t index) const noexcept { return data_[index]; }
#if __cplusplus >= 202002L
    std::span<T> span() const noexcept { return {data_, count_}; }
#endif

private:
    friend class Endpoint;
    Tensor(pleachTensor_t tensor, T *data, std::size_t count) noexcept : tensor_(tensor), data_(data), count_(count) {}
    detail::Owner<pleachTensor_t, &pleachTensorRelease> tensor_;
    T *data_;
    std::size_t count_;
};

// A receive under way; its destructor cancels it, and its tensor is for the next receiver then.
class PendingTensor {
public:
    explicit PendingTensor(pleachReceive_t receive) noexcept : receive_(receive) {}
    bool is_ready() const {
        int ready = 0;
        detail::check(pleachReceiveTest(receive_.get(), &ready));
        return ready != 0;
    }
    // Waits until the deadline of the receive. Once.
    ReceivedTensor wait() {
        pleachTensor_t tensor = nullptr;
        pleachResult_t result = pleachInProgress;
        while (result == pleachInProgress) result = pleachReceiveWait(receive_.get(), 1000, &tensor);
        return ended(result, tensor);
    }
    // Waits at most as long as this: throws Error with pleachInProgress if it is still under way.
    ReceivedTensor wait(std::chrono::milliseconds limit) {
        pleachTensor_t tensor = nullptr;
        const auto result = pleachReceiveWait(receive_.get(), detail::count(limit), &tensor);
        if (result == pleachInProgress) throw Error(result, pleachGetLastError(nullptr));
        return ended(result, tensor);
    }

private:
    ReceivedTensor ended(pleachResult_t result, pleachTensor_t tensor) {
        detail::check_exchange(result);
        receive_.release();
        return ReceivedTensor(tensor);
    }
    detail::Owner<pleachReceive_t, &pleachReceiveCancel> receive_;
};

// What a callback of a receive gets: the tensor, or the failure.
class Received {
public:
    // The tensor; throws ExchangeError if the receive has failed. Once.
    ReceivedTensor take() {
        if (result_ != pleachSuccess) {
            if (failure_.kind != pleachExchangeNone) throw ExchangeError(result_, failure_);
            throw Error(result_, "the receive has failed");
        }
        return ReceivedTensor(tensor_.release());
    }
    pleachResult_t result() const noexcept { return result_; }
    // pleachExchangeNone after success.
    int kind() const noexcept { return failure_.kind; }

private:
    friend class Peer;
    Received(pleachResult_t result, pleachTensor_t tensor) : result_(result), tensor_(tensor) {
        if (result != pleachSuccess) detail::exchange_failure(result, failure_);
    }
    pleachResult_t result_;
    detail::Owner<pleachTensor_t, &pleachTensorRelease> tensor_;
    pleachExchangeFailure_t failure_ = PLEACH_EXCHANGE_FAILURE_INITIALIZER;
};

// Another program, of which tensors are received. A limit of 0 is the time of the endpoint.
class Peer {
public:
    pleachPeer_t get() const noexcept { return peer_.get(); }
    // Makes the link and waits until memory is shared: the next tensors come in place.
    void share_regions(std::chrono::milliseconds limit = {}) const {
        detail::check(pleachPeerShareRegions(get(), detail::count(limit)));
    }
    // That of its endpoint; 0 before the first link.
    std::uint64_t incarnation() const {
        std::uint64_t incarnation = 0;
        detail::check(pleachPeerIncarnation(get(), &incarnation));
        return incarnation;
    }
    ReceivedTensor receive(std::uint64_t step, const std::string &name, std::chrono::milliseconds limit = {}) const {
        pleachTensor_t tensor = nullptr;
        detail::check_exchange(pleachPeerReceive(get(), step, name.c_str(), detail::count(limit), &tensor));
        return ReceivedTensor(tensor);
    }
    PendingTensor start_receive(std::uint64_t step, const std::string &name, std::chrono::milliseconds limit = {}) const {
        pleachReceive_t receive = nullptr;
        detail::check_exchange(
            pleachPeerStartReceive(get(), step, name.c_str(), detail::count(limit), nullptr, nullptr, &receive));
        return PendingTensor(receive);
    }
    // Calls `done` once, in a thread of the endpoint. `done` must not throw. If this function
    // throws, it is not called.
    void receive_async(std::uint64_t step, const std::string &name, std::function<void(Received)> done,
                       std::chrono::milliseconds limit = {}) const {
        auto held = std::make_unique<std::function<void(Received)>>(std::move(done));
        detail::check_exchange(
            pleachPeerStartReceive(get(), step, name.c_str(), detail::count(limit), &told, held.get(), nullptr));
        held.release();
    }

private:
    friend class Endpoint;
    explicit Peer(pleachPeer_t peer) noexcept : peer_(peer) {}
    static void told(void *context, pleachResult_t result, pleachTensor_t tensor) {
        std::unique_ptr<std::function<void(Received)>> done(static_cast<std::function<void(Received)> *>(context));
        (*done)(Received(result, tensor));
    }
    detail::Owner<pleachPeer_t, &pleachPeerClose> peer_;
};

inline pleachEndpointOptions_t default_endpoint_options() { return PLEACH_ENDPOINT_OPTIONS_INITIALIZER; }

// Where this program's tensors are received by others; its destructor closes it.
class Endpoint {
public:
    explicit Endpoint(const pleachEndpointOptions_t &options = default_endpoint_options()) {
        pleachEndpoint_t endpoint = nullptr;
        detail::check(pleachEndpointOpen(&endpoint, &options));
        endpoint_ = Owned(endpoint);
    }
    pleachEndpoint_t get() const noexcept { return endpoint_.get(); }
    void close() { detail::check(pleachEndpointClose(endpoint_.release())); }
    std::string address() const {
        char address[PLEACH_ADDRESS_BYTES];
        detail::check(pleachEndpointAddress(get(), address, sizeof address));
        return address;
    }
    // Another number for each endpoint that is opened.
    std::uint64_t incarnation() const {
        std::uint64_t incarnation = 0;
        detail::check(pleachEndpointIncarnation(get(), &incarnation));
        return incarnation;
    }
    pleachEndpointCounts_t counts() const {
        pleachEndpointCounts_t counts = PLEACH_ENDPOINT_COUNTS_INITIALIZER;
        detail::check(pleachEndpointGetCounts(get(), &counts));
        return counts;
    }
    template <typename T> Tensor<T> tensor(const std::vector<std::size_t> &dims) const {
        pleachTensor_t tensor = nullptr;
        void *data = nullptr;
        detail::check(pleachTensorAlloc(get(), DataType<T>::value, dims.size(), dims.data(), &data, &tensor));
        std::size_t count = 1;
        for (std::size_t dim : dims) count *= dim;
        return Tensor<T>(tensor, static_cast<T *>(data), count);
    }
    template <typename T>
    void send(std::uint64_t step, const std::string &name, const Tensor<T> &tensor,
              std::chrono::milliseconds limit = {}) const {
        detail::check_exchange(pleachEndpointSend(get(), step, name.c_str(), tensor.get(), detail::count(limit)));
    }
    // A copy of elements that lie anywhere.
    template <typename T>
    void send_copy(std::uint64_t step, const std::string &name, const T *data, const std::vector<std::size_t> &dims,
                   std::chrono::milliseconds limit = {}) const {
        detail::check_exchange(pleachEndpointSendMemory(get(), step, name.c_str(),
                                                        const_cast<void *>(static_cast<const void *>(data)),
                                                        DataType<T>::value, dims.size(), dims.data(), nullptr, nullptr,
                                                        detail::count(limit)));
    }
    // Elements that stay where they are until `release` is called with their address, once, by any
    // thread: without a copy where they lie in memory of pleachLendableAlloc. `release` does not
    // throw. If this function throws, it is not called.
    template <typename T>
    void send_memory(std::uint64_t step, const std::string &name, T *data, const std::vector<std::size_t> &dims,
                     std::function<void(T *)> release, std::chrono::milliseconds limit = {}) const {
        auto held = std::make_unique<std::function<void(T *)>>(std::move(release));
        detail::check_exchange(pleachEndpointSendMemory(get(), step, name.c_str(), data, DataType<T>::value, dims.size(),
                                                        dims.data(), &detail::released<T>, held.get(),
                                                        detail::count(limit)));
        held.release();
    }
    // Offers the tensors of a step to all programs, any number of times.
    template <typename T>
    void publish(std::uint64_t step, const std::vector<std::pair<std::string, const Tensor<T> *>> &tensors) const {
        std::vector<const char *> names;
        std::vector<pleachTensor_t> handles;
        for (const auto &[name, tensor] : tensors) {
            names.push_back(name.c_str());
            handles.push_back(tensor->get());
        }
        detail::check(pleachEndpointPublish(get(), step, names.size(), names.data(), handles.data()));
    }
    void abort(std::uint64_t step, const std::string &reason) const {
        detail::check(pleachEndpointAbort(get(), step, reason.c_str()));
    }
    void clean_up(std::uint64_t step) const { detail::check(pleachEndpointCleanUp(get(), step)); }
    // A tensor that this program itself sends.
    ReceivedTensor receive(std::uint64_t step, const std::string &name, std::chrono::milliseconds limit = {}) const {
        pleachTensor_t tensor = nullptr;
        detail::check_exchange(pleachEndpointReceive(get(), step, name.c_str(), detail::count(limit), &tensor));
        return ReceivedTensor(tensor);
    }
    Peer connect(const std::string &address) const {
        pleachPeer_t peer = nullptr;
        detail::check(pleachEndpointConnect(get(), address.c_str(), &peer));
        return Peer(peer);
    }

private:
    using Owned = detail::Owner<pleachEndpoint_t, &pleachEndpointClose>;
    Owned endpoint_;
};

} // namespace pleach

#endif // PLEACH_EXCHANGE_HPP
