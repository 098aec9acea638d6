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

// Types, factors, and what a communicator says of itself.
static void details(const pleach::Communicator &comm, int rank, int ranks) {
    CHECK(pleach::version() == 10000 * PLEACH_VERSION_MAJOR + 100 * PLEACH_VERSION_MINOR + PLEACH_VERSION_PATCH);
    CHECK(comm.async_error() == pleachSuccess && comm.waits_for() == -1);
    // One in each type; the sum of as many ones as there are ranks, up to 4, has few bits.
    pleach::Float16 half[2] = {{0x3c00}, {0x3c00}};
    pleach::BFloat16 brain[1] = {{0x3f80}};
    pleach::Float8E4M3 e4m3[1] = {{0x38}};
    pleach::Float8E5M2 e5m2[1] = {{0x3c}};
    comm.all_reduce(half, 2);
    comm.all_reduce(brain, 1, pleachMax);
    comm.all_reduce(e4m3, 1, pleachMax);
    comm.all_reduce(e5m2, 1, pleachMax);
    CHECK(half[0].bits == (ranks == 2 ? 0x4000 : 0x4400) && half[1].bits == half[0].bits);
    CHECK(brain[0].bits == 0x3f80 && e4m3[0].bits == 0x38 && e5m2[0].bits == 0x3c);

    double value = 1;
    {
        // Rank r gives r + 1.
        const auto op = comm.premul_sum(static_cast<double>(rank + 1));
        comm.all_reduce(&value, 1, op);
    }
    CHECK(value == ranks * (ranks + 1) / 2);

    // Memory of ours is refused over shared memory alone; then nobody releases it.
    static int released = 0;
    std::vector<int> mine(1000, 1);
    const pleachResult_t result = thrown([&] {
        const auto registration = comm.register_memory<int>(mine.data(), mine.size(), [](int *) { ++released; });
        comm.all_reduce(mine.data(), mine.size());
        CHECK(mine[0] == ranks && released == 0);
    });
    CHECK(result == pleachSuccess ? released == 1 : (result == pleachInvalidUsage && released == 0));
    CHECK(thrown([&] { (void)comm.register_memory(mine.data(), SIZE_MAX); }) == pleachInvalidArgument);
}

#if __cplusplus >= 202002L
static void spans(const pleach::Communicator &comm, int rank, int ranks) {
    const auto all = static_cast<std::size_t>(ranks), own = static_cast<std::size_t>(rank);
    std::vector<int> numbers(all), one(1, rank), out(all, -1);
    std::iota(numbers.begin(), numbers.end(), 0);
    const std::span<int> whole(out), part(one);
    comm.all_gather(one, whole);
    CHECK(out == numbers);
    comm.all_to_all(numbers, whole);
    for (int element : out) CHECK(element == rank);
    comm.reduce_scatter(numbers, part);
    CHECK(one[0] == rank * ranks);
    comm.all_reduce(numbers, whole, pleachMax);
    CHECK(out == numbers);
    comm.reduce(numbers, rank == 0 ? whole : std::span<int>(), 0);
    CHECK(out[all - 1] == (rank == 0 ? ranks : 1) * (ranks - 1));
    comm.broadcast(numbers, whole, 1);
    CHECK(out == numbers);
    comm.scatter(rank == 1 ? std::span<int>(numbers) : std::span<int>(), part, 1);
    CHECK(one[0] == rank);
    comm.gather(one, rank == 1 ? whole : std::span<int>(), 1);
    comm.broadcast(whole, 1);
    CHECK(out == numbers);
    const std::vector<std::size_t> ones(all, 1);
    comm.all_gather_v(one, whole, ones);
    comm.reduce_scatter_v(numbers, part, ones, pleachMin);
    comm.gather_v(one, whole, ones, 0);
    comm.scatter_v(numbers, part, ones, 0);
    comm.all_to_all_v(numbers, ones, whole, ones);
    CHECK(one[0] == rank && out[own] == rank);
    if (rank == 0) comm.send(part, 1);
    if (rank == 1) comm.recv(part, 0);
    CHECK(one[0] == (rank == 1 ? 0 : rank));
    for (auto &element : out) element = 1;
    comm.all_reduce(whole);
    CHECK(out[0] == ranks);
    CHECK(thrown([&] { comm.all_reduce(one, whole); }) == pleachInvalidArgument);
    CHECK(thrown([&] { comm.all_gather(numbers, whole); }) == pleachInvalidArgument);
    CHECK(thrown([&] { comm.all_gather_v(numbers, whole, ones); }) == pleachInvalidArgument);
    CHECK(thrown([&] { comm.all_to_all(one, part); }) == pleachInvalidArgument);
}
#endif

// Rounds that nobody is late for, and one that the last rank is late for.
static void partials(const pleach::Communicator &comm, const char *path, int rank, int ranks) {
    const bool is_last = rank == ranks - 1;
    const std::string activation = "quorum:" + std::to_string(ranks - 1), meeting = path + std::string(".late");
    std::vector<int> all(static_cast<std::size_t>(ranks));
    std::iota(all.begin(), all.end(), 0);
    const std::vector<int> others(all.begin(), all.end() - 1), last(1, ranks - 1);

    pleach::Partial<double> sums(comm, 3);
    CHECK(sums.size() == 3 && sums.get() != nullptr);
    for (int step = 0; step < 3; ++step) {
        std::fill_n(sums.contribution(), 3, rank + step);
        const auto round = sums.contribute();
        CHECK(round.size() == 3 && round.number() == static_cast<std::uint64_t>(step) && round.missed() == 0);
        CHECK(round.own() == pleachOwnCounted && round.contributors() == all);
        for (double element : round) CHECK(element == ranks * (ranks - 1) / 2 + ranks * step);
        CHECK(round.correction() == nullptr && round.corrected().empty());
    }
    CHECK(thrown([&] { sums.wait(); }) == pleachInvalidUsage);
    std::fill_n(sums.contribution(), 3, 1);
    sums.start_contribute();
    CHECK(thrown([&] { sums.start_contribute(); }) == pleachInvalidUsage);
    std::fill_n(sums.contribution(), 3, 2);
    const auto started = sums.wait();
    for (double element : started) CHECK(element == ranks);
    const auto next = sums.contribute();
    CHECK(next[0] == 2 * ranks && next.number() == 4);
    CHECK(sums.report().rounds == 5 && sums.report().late == 0 && sums.report().ranks == ranks);
    CHECK(sums.counted() == std::vector<std::uint64_t>(all.size(), 5));
    CHECK(sums.finish().contributors().empty());
    CHECK(thrown([&] { sums.contribute(); }) == pleachInvalidUsage);

    auto config = pleach::partial_config(activation.c_str());
    config.late = pleachLateCorrect;
    pleach::Partial<std::int32_t> given(comm, 2, config, pleachMax), late(std::move(given));
    CHECK(given.get() == nullptr && thrown([&] { given.contribution(); }) == pleachInvalidArgument);
    if (is_last) all_are_here(meeting.c_str(), rank, ranks);
#if __cplusplus >= 202002L
    for (auto &element : late.contribution_span()) element = rank;
    const std::span<const std::int32_t> elements(late.contribute());
#else
    std::fill_n(late.contribution(), 2, rank);
    const auto elements = late.contribute();
#endif
    CHECK(elements.size() == 2 && elements[0] == ranks - 2 && elements[1] == ranks - 2);
    if (!is_last) all_are_here(meeting.c_str(), rank, ranks);
    const auto round = late.finish();
    CHECK(round.corrected() == last && round.correction()[1] == ranks - 1);
    CHECK(late.report().corrected == (is_last ? 1u : 0u) && late.report().late == late.report().corrected);
    CHECK(round.contributors().empty());
    CHECK(thrown([&] { pleach::Partial<float>(comm, 1, pleach::partial_config("never")); }) == pleachInvalidArgument);
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
    details(comm, rank, ranks);
#if __cplusplus >= 202002L
    spans(comm, rank, ranks);
#endif
    partials(comm, argv[3], rank, ranks);
    std::uint8_t sent = 7, got = 0;
    pleach::grouped([&] {
        comm.send(&sent, 1, (rank + 1) % ranks);
        comm.recv(&got, 1, (rank + ranks - 1) % ranks);
    });
    CHECK(got == 7);
    CHECK(thrown([&] { comm.broadcast(out.data(), 1, ranks); }) == pleachInvalidArgument);
    CHECK(comm.failure().kind == pleachFailureNone);

    pleachConfig_t config = pleach::default_config();
    config.timeoutMs = 20000;
    auto part = comm.split(rank == 0 ? PLEACH_SPLIT_NOCOLOR : 1, 0, config);
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
        CHECK(comm.async_error() == pleachInvalidUsage);
        CHECK(error.failure().rank >= 0 && std::string(error.what()).find("barrier") != std::string::npos);
    }
    CHECK(comm.failure().kind == pleachFailureMismatch);
    CHECK(thrown([&] { comm.barrier(); }) == pleachInvalidUsage);
    comm.set_timeout(std::chrono::milliseconds(200));
    CHECK(thrown([&] { comm.set_timeout(std::chrono::milliseconds(-1)); }) == pleachInvalidArgument);
    return 0;
}
