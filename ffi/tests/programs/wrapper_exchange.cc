// The tensor exchange in C++: types, destructors, exceptions, callbacks: wrapper_exchange 0 1
// ID-FILE FABRIC.
#include <algorithm>
#include <atomic>
#include <future>

#include "meet.h"
#include "pleach.hpp"

using namespace std::chrono_literals;

template <typename Call> pleachExchangeFailure_t thrown(Call &&call) {
    try {
        call();
    } catch (const pleach::ExchangeError &error) {
        CHECK(std::string(error.what()).size() > 10 && error.kind() == error.failure().kind);
        CHECK(error.failure().result == static_cast<int>(error.result()));
        return error.failure();
    }
    CHECK(false);
    return {};
}

template <typename Call> pleachResult_t refused(Call &&call) {
    try {
        call();
    } catch (const pleach::ExchangeError &) {
        CHECK(false);
    } catch (const pleach::Error &error) {
        return error.result();
    }
    return pleachSuccess;
}

int main(int argc, char **argv) {
    CHECK(argc > 4);
    const std::string fabric = argv[4];
    auto options = pleach::default_endpoint_options();
    options.listen = "127.0.0.1:0", options.fabric = fabric.c_str(), options.timeoutMs = 20000;
    pleach::Endpoint sender(options), receiver(options);
    auto moved = receiver.connect(sender.address());
    const auto peer = std::move(moved);
    CHECK(peer.incarnation() == 0);
    if (fabric == "shm") peer.share_regions(20s);
    CHECK(fabric != "shm" || peer.incarnation() == sender.incarnation());
    const int way = fabric == "shm" ? pleachTensorInPlace : pleachTensorInline;

    {
        auto tensor = sender.tensor<float>({3, 100});
        CHECK(tensor.size() == 300);
        std::fill(tensor.begin(), tensor.end(), 1.5F);
        sender.send(1, "w", tensor);
        sender.send(1, "w", tensor);
        sender.publish<float>(2, {{"a", &tensor}, {"b", &tensor}});
    }
    for (int time = 0; time < 2; ++time) {
        const auto received = peer.receive(1, "w");
        CHECK((received.shape() == pleach::Shape{pleachFloat32, {3, 100}}) && received.way() == way);
        CHECK(received.count<float>() == 300 && received.elements<float>()[299] == 1.5F);
        CHECK(refused([&] { (void)received.elements<std::int32_t>(); }) == pleachInvalidArgument);
#if __cplusplus >= 202002L
        const auto span = received.span<float>();
        CHECK(std::all_of(span.begin(), span.end(), [](float x) { return x == 1.5F; }));
#endif
    }
    CHECK(peer.receive(2, "b").bytes() == 1200 && peer.receive(2, "b").bytes() == 1200);
    const auto missing = thrown([&] { (void)peer.receive(2, "c"); });
    CHECK(missing.kind == pleachExchangeNotFound && missing.step == 2 && std::string(missing.name) == "c");
    CHECK(std::string(missing.peer) == sender.address());

    const std::vector<std::int16_t> numbers = {1, 2, 3};
    sender.send_copy(3, "copy", numbers.data(), {3});
    CHECK(sender.receive(3, "copy").elements<std::int16_t>()[2] == 3);

    auto pending = peer.start_receive(4, "w");
    CHECK(!pending.is_ready() && refused([&] { (void)pending.wait(5ms); }) == pleachInProgress);
    sender.send(4, "w", sender.tensor<double>({}));
    CHECK(pending.wait().count<double>() == 1);
    CHECK(thrown([&] { (void)peer.receive(4, "w", 20ms); }).kind == pleachExchangeTimeout);
    { const auto cancelled = peer.start_receive(5, "w"); }

    // Callbacks, which take the tensor with them.
    std::promise<pleach::ReceivedTensor> told;
    peer.receive_async(6, "w", [&](pleach::Received received) { told.set_value(received.take()); });
    sender.send_copy(6, "w", numbers.data(), {1, 3});
    CHECK((told.get_future().get().shape() == pleach::Shape{pleachInt16, {1, 3}}));
    std::promise<int> failed;
    peer.receive_async(7, "w", [&](pleach::Received received) {
        CHECK(thrown([&] { (void)received.take(); }).step == 7);
        failed.set_value(received.kind());
    });
    sender.abort(7, "over");
    CHECK(failed.get_future().get() == pleachExchangeAborted);
    sender.clean_up(7);

    // Memory of an allocator.
    void *memory = nullptr;
    CHECK(pleachLendableAlloc(sender.get(), 4096, &memory) == pleachSuccess);
    auto *elements = static_cast<std::int64_t *>(memory);
    std::promise<std::int64_t *> released;
    elements[7] = 70;
    sender.send_memory<std::int64_t>(8, "w", elements, {512}, [&](std::int64_t *data) { released.set_value(data); });
    auto is_released = released.get_future();
    {
        const auto received = peer.receive(8, "w");
        CHECK(received.elements<std::int64_t>()[7] == 70);
        if (way == pleachTensorInPlace) CHECK(is_released.wait_for(20ms) == std::future_status::timeout);
    }
    CHECK(is_released.get() == elements && pleachLendableFree(memory) == pleachSuccess);

    CHECK(refused([&] { (void)sender.connect("nowhere"); }) == pleachInvalidArgument);
    CHECK(refused([&] { sender.send(1, "", sender.tensor<float>({1})); }) == pleachInvalidArgument);
    CHECK(refused([&] { (void)peer.receive(1, "w", -1ms); }) == pleachInvalidArgument);
    CHECK(receiver.counts().links == 1);
    sender.close();
    CHECK(thrown([&] { (void)peer.receive(1, "w"); }).kind == pleachExchangeUnavailable);
    CHECK(refused([&] { sender.abort(1, "closed"); }) == pleachInvalidArgument);
    return 0;
}
