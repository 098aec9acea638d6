// The wrapper of C++: windows and sessions: wrapper_session RANK RANKS ID-FILE.
#include <algorithm>
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

static void windows(const char *path, int rank, int ranks) {
    pleachUniqueId id;
    share_id_of(path, "window", rank, &id);
    pleach::Communicator comm(ranks, id, rank);
    pleach::Window<std::int32_t> given(comm, 10, 2), window(std::move(given));
    CHECK(given.get() == nullptr && window.size() == 10);
    std::vector<std::int32_t> own(10), theirs(10);
    std::iota(own.begin(), own.end(), 100 * rank);
    CHECK(window.publish(own.data(), pleach::word(0.5 * rank)) == 1);
    comm.barrier();
    const int next = (rank + 1) % ranks;
    const auto version = window.read(next, 2, 3, theirs.data());
    CHECK(version.number == 1 && pleach::value_of<double>(version.word) == 0.5 * next);
    CHECK(theirs[0] == 100 * next + 2 && theirs[2] == 100 * next + 4 && theirs[3] == 0);
    CHECK(window.read_torn(next, 0, 10, theirs.data()) == 1 && theirs[9] == 100 * next + 9);
    CHECK(thrown([&] { window.read(next, 8, 3, theirs.data()); }) == pleachInvalidArgument);
    CHECK(window.is_free(next, 1));
    window.write(next, 1, own.data(), 4, pleach::word(rank));
    const int former = (rank + ranks - 1) % ranks;
    std::size_t seen = 0;
    while (seen == 0)
        seen = window.poll(
            [&](const pleach::Arrival<std::int32_t> &arrival) {
                CHECK(arrival.source() == former && arrival.slot() == 1 && arrival.size() == 4);
                CHECK(pleach::value_of<int>(arrival.word()) == former);
                CHECK(std::accumulate(arrival.begin(), arrival.end(), 0) == 400 * former + 6);
            },
            std::chrono::milliseconds(60000));
    CHECK(seen == 1);
    comm.barrier();
    CHECK(window.is_free(next, 1));
    // An exception passes when all have been seen.
    window.write(next, 0, own.data(), 0);
    window.write(next, 1, own.data(), 1);
    comm.barrier();
    int calls = 0;
    try {
        while (calls < 2)
            window.poll([&](const auto &) { if (++calls == 2) throw std::runtime_error("seen"); });
        CHECK(false);
    } catch (const std::runtime_error &error) {
        CHECK(std::string(error.what()) == "seen" && calls == 2);
    }
    comm.barrier();
    window.finalize();
    CHECK(thrown([&] { window.publish(own.data()); }) == pleachInvalidUsage);
}

static void sessions(const char *path, int rank, int ranks) {
    const auto all = static_cast<std::uint32_t>(ranks);
    pleachUniqueId id;
    share_id_of(path, "session", rank, &id);
    pleach::Session session(ranks, id, rank, pleach::elastic(all, all));
    CHECK(session.seat() == rank && session.step() == 0);
    auto *sums = session.buffer<float>(1000);
    session.free_buffer(session.buffer<char>(10));
    CHECK(session.state<double>("weights", 4) == session.state<double>("weights"));
    double *weights = session.state<double>("weights");
    std::vector<int> colors(all, 1);
    colors[0] = PLEACH_SPLIT_NOCOLOR;
    const int others = session.split(colors);
    int retries = 0;
    while (session.step() < 5) {
        const auto verdict = session.attempt([&](const pleach::Communicator &epoch, std::uint64_t step) {
            CHECK(epoch.rank() == rank && epoch.size() == ranks && step == session.step());
            std::fill_n(sums, 1000, 1.0f);
            if (step == 2 && retries == 0 && rank == 0) throw std::runtime_error("not yet");
            epoch.all_reduce(sums, 1000);
            const pleachComm_t part = session.split_comm(others);
            CHECK((part == nullptr) == (rank == 0));
            int count = 0;
            if (part != nullptr) CHECK(pleachCommCount(part, &count) == pleachSuccess && count == ranks - 1);
        });
        if (verdict.kind == pleachVerdictRetry) {
            ++retries;
            CHECK(session.change(pleachChangeLeft).empty() && session.change(pleachChangeMembers).size() == all);
            continue;
        }
        CHECK(verdict.kind == pleachVerdictCommitted && sums[999] == static_cast<float>(ranks));
        std::for_each(weights, weights + 4, [&](double &weight) { weight += sums[0]; });
        session.audit();
    }
    // A rank that had not begun step 2 by then has nothing to repeat.
    CHECK((rank == 0 ? retries == 1 : retries <= 1) && weights[3] == 5.0 * ranks);
    // A step that throws for ever: the exception, and on the others an Error.
    pleachResult_t result = pleachSuccess;
    try {
        while (true)
            session.attempt([&](const pleach::Communicator &epoch, std::uint64_t) {
                // All have begun the step.
                epoch.barrier();
                if (rank == 0) throw 42;
            });
    } catch (const pleach::Error &error) {
        result = error.result();
    } catch (int number) {
        CHECK(rank == 0 && number == 42);
        result = pleachStepFailed;
    }
    CHECK(result == pleachStepFailed);
    session.leave_on(10);
    session.leave();
    CHECK(thrown([&] { session.leave_after_step(); }) == pleachInvalidUsage);
    CHECK(weights == session.state<double>("weights") && weights[0] == 5.0 * ranks);
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    const int rank = atoi(argv[1]), ranks = atoi(argv[2]);
    windows(argv[3], rank, ranks);
    sessions(argv[3], rank, ranks);
    return 0;
}
