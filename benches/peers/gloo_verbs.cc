// Gloo beside pleach, over RDMA by its ibverbs transport. Takes FOLDER DEVICE,DEVICE GID_INDEX
// ALGORITHM before the arguments that measure.h reads: it starts its two ranks itself, each on one
// device, and they meet in the folder.
//
// That transport knows registered buffers alone, so only Gloo's older algorithms go over it, which
// are made for an address and a length and run again and again: its ring, its ring in chunks and
// its halving and doubling. They are made once for each address, before the first sample is over,
// and run as often as wanted. Its thread waits for events: with callers that poll (setSync) nobody
// sees the last completions before buffers go, which it forbids.
#include "measure.h"

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/ibverbs/device.h>

namespace {

enum { RANKS = 2, PORT = 1 };

using Made = std::unique_ptr<gloo::Algorithm>;

const auto TIMEOUT = std::chrono::seconds(60);

struct Rank {
    std::shared_ptr<gloo::Context> context;
    Made barrier, maximum;
    double greatest;
    std::string algorithm;
    // By address.
    std::map<float *, Made> sums;
};

Rank &of(struct peer *peer) { return *static_cast<Rank *>(peer->context); }

void barrier(struct peer *peer) { of(peer).barrier->run(); }

double greatest(struct peer *peer, double own) {
    Rank &rank = of(peer);
    rank.greatest = own;
    rank.maximum->run();
    return rank.greatest;
}

Made sum(const Rank &rank, float *data, int count) {
    std::vector<float *> pointers{data};
    const auto &context = rank.context;
    if (rank.algorithm == "ring") return Made(new gloo::AllreduceRing<float>(context, pointers, count));
    if (rank.algorithm == "ring-chunked") return Made(new gloo::AllreduceRingChunked<float>(context, pointers, count));
    if (rank.algorithm == "halving-doubling")
        return Made(new gloo::AllreduceHalvingDoubling<float>(context, pointers, count));
    fail("no such algorithm: give ring, ring-chunked or halving-doubling");
    return nullptr;
}

void run(struct peer *peer, enum collective collective, float *data, float *, long elements) {
    if (collective != ALL_REDUCE) fail("not measured of gloo over ibverbs: this collective");
    Rank &rank = of(peer);
    Made &made = rank.sums[data];
    if (!made) made = sum(rank, data, static_cast<int>(elements));
    made->run();
}

// What is under way on a buffer must have ended before it goes; what has been answered has.
void release(struct peer *peer, void *memory, size_t bytes) {
    barrier(peer);
    barrier(peer);
    of(peer).sums.clear();
    munmap(memory, bytes);
}

int run_rank(char **arguments, const std::string &device, int number, const struct task &task) {
    gloo::transport::ibverbs::attr attributes = {device, PORT, atoi(arguments[3])};
    gloo::rendezvous::FileStore store(arguments[1]);
    Rank rank = {};
    rank.algorithm = arguments[4];
    auto connected = std::make_shared<gloo::rendezvous::Context>(number, RANKS);
    connected->setTimeout(TIMEOUT);
    auto opened = gloo::transport::ibverbs::CreateDevice(attributes);
    connected->connectFullMesh(store, opened);
    rank.context = connected;
    rank.barrier.reset(new gloo::BarrierAllToAll(rank.context));
    rank.maximum.reset(new gloo::AllreduceRing<double>(
        rank.context, {&rank.greatest}, 1, gloo::ReductionFunction<double>::max));
    struct peer peer = {};
    peer.rank = number;
    peer.ranks = RANKS;
    peer.context = &rank;
    peer.barrier = barrier;
    peer.greatest = greatest;
    peer.run = run;
    peer.release = release;
    return measure_all(&peer, &task);
}

} // namespace

int main(int count, char **arguments) {
    if (count < 6) fail("bad arguments: give FOLDER DEVICE,DEVICE GID_INDEX ALGORITHM COLLECTIVE ...");
    std::string devices = arguments[2];
    size_t comma = devices.find(',');
    if (comma == std::string::npos) fail("bad arguments: two devices with a comma between");
    struct task task = read_task(count - 4, arguments + 4);
    if (fork() == 0) return run_rank(arguments, devices.substr(comma + 1), 1, task);
    int status = run_rank(arguments, devices.substr(0, comma), 0, task);
    int others = 0, one;
    while (wait(&one) > 0) others |= one;
    return status || others;
}
