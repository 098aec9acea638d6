// Devices and regions in C++: types, destructors, exceptions: wrapper_device RANK RANKS ID-FILE
// FABRIC.
#include <algorithm>

#include "meet.h"
#include "pleach.hpp"

using namespace std::chrono_literals;

template <typename Call> pleachResult_t thrown(Call &&call) {
    try {
        call();
    } catch (const pleach::Error &error) {
        CHECK(std::string(error.what()).size() > 10);
        return error.result();
    }
    return pleachSuccess;
}

int main(int argc, char **argv) {
    CHECK(argc == 5);
    const int rank = atoi(argv[1]), ranks = atoi(argv[2]);
    const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    pleachUniqueId id;
    share_id(argv[3], rank, &id);
    pleachConfig_t config = pleach::default_config();
    config.fabric = argv[4];
    auto device = pleach::Device(ranks, id, rank, config);
    auto moved = std::move(device);
    device = std::move(moved);
    CHECK(device.rank() == rank && device.size() == ranks && std::string(device.info().fabric) == argv[4]);

    auto region = device.allocate<float>(1000);
    auto word = device.allocate<std::uint64_t>(1);
    CHECK(region.size() == 1000 && std::all_of(region.begin(), region.end(), [](float x) { return x == 0; }));
    struct Names {
        pleachRemoteSlice_t half, word;
    };
    const auto names = device.exchange(Names{region.name(500, 500), word.name()});
    const auto &of_next = names[static_cast<std::size_t>(next)];
    CHECK(names.size() == static_cast<std::size_t>(ranks));

    std::fill(region.begin(), region.begin() + 500, static_cast<float>(rank + 1));
    auto put = device.put(next, region, 0, 500, of_next.half, {7, "hello", 5});
    const auto payload = device.wait_for_signal(previous, 7, 1, 20s);
    CHECK(memcmp(payload.data(), "hello", 5) == 0 && device.signal_count(previous, 7) == 1);
    CHECK(region[500] == static_cast<float>(previous + 1) && region[999] == region[500]);
    put.wait(20s);
    CHECK(thrown([&] { put.wait(0s); }) == pleachInvalidArgument);
    device.barrier();
    device.get_from(next, of_next.half, region, 0, 500).wait(20s);
    CHECK(region[0] == static_cast<float>(rank + 1));
    CHECK(device.atomic_add(next, of_next.word, 40).wait(20s) == 0);
    CHECK(device.atomic_compare_swap(next, of_next.word, 40, 2).wait(20s) == 40);
    device.signal(next, {8});
    device.wait_for_signal(previous, 8, 1, 20s);
    CHECK(word[0] == 2);

    // Memory of the caller's.
    std::vector<std::int32_t> user(16, rank);
    bool is_released = false;
    const auto release = [&](std::int32_t *data) { is_released = data == user.data(); };
    const auto registers = [&] { return device.register_memory<std::int32_t>(user.data(), user.size(), release); };
    if (config.fabric == std::string("tcp")) {
        {
            auto registered = registers();
            CHECK(registered.data() == user.data() && registered.size() == 16 && !is_released);
            const auto theirs = device.exchange(registered.name());
            device.get_from(next, theirs[static_cast<std::size_t>(next)], registered, 0, 16).wait(20s);
            CHECK(user[3] == next || user[3] == (next + 1) % ranks);
            device.barrier();
        }
        CHECK(is_released);
    } else {
        CHECK(thrown(registers) == pleachInvalidUsage && !is_released);
    }

    CHECK(thrown([&] { device.allocate<float>(SIZE_MAX); }) == pleachInvalidArgument);
    CHECK(thrown([&] { device.allocate<float>(0); }) == pleachInvalidArgument);
    CHECK(thrown([&] { region.name(1, 1000); }) == pleachInvalidArgument);
    CHECK(thrown([&] { (void)device.put(rank, region, 0, 500, of_next.half); }) == pleachInvalidArgument);
    CHECK(thrown([&] { (void)device.put(next, region, 900, 500, of_next.half); }) == pleachInvalidArgument);
    CHECK(thrown([&] { device.wait_for_signal(previous, 9, 1, 10ms); }) == pleachTimeout);
    CHECK(thrown([&] { device.wait_for_signal(previous, 9, 1, -1ms); }) == pleachInvalidArgument);
    auto alone = pleach::Device::from_environment();
    CHECK(alone.size() == 1);
    alone.close();
    CHECK(thrown([&] { alone.barrier(); }) == pleachInvalidArgument);
    device.barrier();
    return 0;
}
