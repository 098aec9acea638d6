// Gloo beside pleach, over TCP on the loopback interface. Takes FOLDER RANKS before the arguments
// that measure.h reads: it starts its ranks itself, and they meet in the folder.
#include "measure.h"

#include <chrono>
#include <memory>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

namespace {

using Context = std::shared_ptr<gloo::Context>;

const auto TIMEOUT = std::chrono::seconds(60);

Context &context_of(struct peer *peer) { return *static_cast<Context *>(peer->context); }

void barrier(struct peer *peer) {
    gloo::BarrierOptions options(context_of(peer));
    gloo::barrier(options);
}

template <typename T> void maximum(void *into, const void *left, const void *right, size_t count) {
    gloo::max<T>(static_cast<T *>(into), static_cast<const T *>(left), static_cast<const T *>(right), count);
}

double greatest(struct peer *peer, double own) {
    gloo::AllreduceOptions options(context_of(peer));
    options.setOutput(&own, 1);
    options.setReduceFunction(maximum<double>);
    gloo::allreduce(options);
    return own;
}

template <typename T> void sum(void *into, const void *left, const void *right, size_t count) {
    gloo::sum<T>(static_cast<T *>(into), static_cast<const T *>(left), static_cast<const T *>(right), count);
}

void run(struct peer *peer, enum collective collective, float *data, float *output, long elements) {
    Context &context = context_of(peer);
    size_t count = static_cast<size_t>(elements);
    if (collective == ALL_REDUCE) {
        gloo::AllreduceOptions options(context);
        options.setOutput(data, count);
        options.setReduceFunction(sum<float>);
        gloo::allreduce(options);
    } else if (collective == REDUCE) {
        gloo::ReduceOptions options(context);
        options.setOutput(data, count);
        options.setRoot(0);
        options.setReduceFunction(sum<float>);
        gloo::reduce(options);
    } else if (collective == BROADCAST) {
        gloo::BroadcastOptions options(context);
        options.setOutput(data, count);
        options.setRoot(0);
        gloo::broadcast(options);
    } else if (collective == ALL_GATHER) {
        gloo::AllgatherOptions options(context);
        options.setInput(data, count);
        options.setOutput(output, count * peer->ranks);
        gloo::allgather(options);
    } else if (collective == BARRIER) {
        barrier(peer);
    } else {
        fail("not measured of gloo: this collective");
    }
}

int run_rank(const std::string &folder, int rank, int ranks, const struct task &task) {
    gloo::transport::tcp::attr attributes;
    attributes.iface = "lo";
    auto device = gloo::transport::tcp::CreateDevice(attributes);
    gloo::rendezvous::FileStore store(folder);
    auto connected = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    connected->setTimeout(TIMEOUT);
    connected->connectFullMesh(store, device);
    Context context = connected;
    struct peer peer = {};
    peer.rank = rank;
    peer.ranks = ranks;
    peer.context = &context;
    peer.barrier = barrier;
    peer.greatest = greatest;
    peer.run = run;
    return measure_all(&peer, &task);
}

} // namespace

int main(int count, char **arguments) {
    if (count < 4) fail("bad arguments: give FOLDER RANKS COLLECTIVE ...");
    std::string folder = arguments[1];
    int ranks = atoi(arguments[2]);
    struct task task = read_task(count - 2, arguments + 2);
    for (int rank = 1; rank < ranks; rank++) {
        if (fork() == 0) return run_rank(folder, rank, ranks, task);
    }
    int status = run_rank(folder, 0, ranks, task);
    int others = 0, one;
    while (wait(&one) > 0) others |= one;
    return status || others;
}
