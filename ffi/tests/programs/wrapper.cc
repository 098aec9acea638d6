// The wrapper of C++: types, destructors, exceptions: wrapper RANK RANKS ID-FILE.
#include <numeric>

#include "meet.h"
#include "pleach.hpp"

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
    CHECK(argc == 4);
    const int rank = atoi(argv[1]), ranks = atoi(argv[2]);
    pleachUniqueId id;
    share_id(argv[3], rank, &id);
    pleach::Communicator comm(ranks, id, rank);
    CHECK(comm && comm.rank() == rank && comm.size() == ranks);

    const auto all = static_cast<std::size_t>(ranks);
    const std::int64_t total = static_cast<std::int64_t>(ranks) * (ranks - 1) / 2;
    pleach::Memory<std::int64_t> memory(5000);
    {
        auto registration = comm.register_memory(memory.data(), memory.size());
        auto moved = std::move(registration);
        std::fill(memory.begin(), memory.end(), rank);
        comm.all_reduce(memory.data(), memory.size());
        for (auto element : memory) CHECK(element == total);
    }
    std::vector<double> in(all, rank), out(all);
    comm.all_to_all(in.data(), out.data(), 1);
    for (std::size_t of = 0; of < all; ++of) CHECK(out[of] == static_cast<double>(of));
    comm.all_gather(in.data(), out.data(), 1);
    for (std::size_t of = 0; of < all; ++of) CHECK(out[of] == static_cast<double>(of));
    comm.all_gather_v(in.data(), out.data(), std::vector<std::size_t>(all, 1));
    CHECK(thrown([&] { comm.all_gather_v(in.data(), out.data(), {1}); }) == pleachInvalidArgument || ranks == 1);
    // Block r has r + 1 elements.
    std::vector<std::size_t> counts(all), own_counts(all, static_cast<std::size_t>(rank) + 1);
    std::iota(counts.begin(), counts.end(), std::size_t{1});
    const std::size_t elements = all * (all + 1) / 2, mine = own_counts[0];
    std::vector<double> own(mine, rank), whole(elements, -1), square(all * mine, -1);
    comm.gather_v(own.data(), whole.data(), counts, 0);
    if (rank == 0)
        for (std::size_t of = 0, at = 0; of < all; at += counts[of++])
            CHECK(whole[at] == static_cast<double>(of) && whole[at + of] == static_cast<double>(of));
    comm.broadcast(whole.data(), whole.size(), 0);
    std::fill(own.begin(), own.end(), -1);
    comm.scatter_v(whole.data(), own.data(), counts, 0);
    for (double element : own) CHECK(element == rank);
    comm.reduce_scatter_v(whole.data(), own.data(), counts);
    for (double element : own) CHECK(element == rank * ranks);
    comm.all_to_all_v(whole.data(), counts, square.data(), own_counts);
    for (double element : square) CHECK(element == rank);
    CHECK(thrown([&] { comm.scatter_v(whole.data(), own.data(), {1}, 0); }) == pleachInvalidArgument);
    comm.broadcast(out.data(), out.size(), 0);
#if __cplusplus >= 202002L
    comm.all_reduce(std::span<double>(out), pleachMax);
#endif
    std::uint8_t sent = 7, got = 0;
    pleach::grouped([&] {
        comm.send(&sent, 1, (rank + 1) % ranks);
        comm.recv(&got, 1, (rank + ranks - 1) % ranks);
    });
    CHECK(got == 7);
    CHECK(thrown([&] { comm.broadcast(out.data(), 1, ranks); }) == pleachInvalidArgument);
    CHECK(comm.failure().kind == pleachFailureNone);

    auto part = comm.split(rank == 0 ? PLEACH_SPLIT_NOCOLOR : 1, 0);
    CHECK(static_cast<bool>(part) == (rank != 0));
    part = pleach::Communicator::from_environment();
    CHECK(part.size() == 1);

    // A failure carries its struct: the ranks make different calls. No rank is still in a call
    // above.
    all_are_here(argv[3], rank, ranks);
    try {
        if (rank == 0)
            comm.barrier();
        else
            comm.all_reduce(in.data(), in.size());
        CHECK(false);
    } catch (const pleach::CommunicatorError &error) {
        CHECK(error.result() == pleachInvalidUsage && error.failure().kind == pleachFailureMismatch);
        CHECK(error.failure().rank >= 0 && std::string(error.what()).find("barrier") != std::string::npos);
    }
    CHECK(comm.failure().kind == pleachFailureMismatch);
    CHECK(thrown([&] { comm.barrier(); }) == pleachInvalidUsage);
    comm.set_timeout(std::chrono::milliseconds(200));
    CHECK(thrown([&] { comm.set_timeout(std::chrono::milliseconds(-1)); }) == pleachInvalidArgument);
    return 0;
}
