/* Any MPI beside pleach: compiled with each one's mpicc, so one source serves all. See measure.h
 * for the arguments. */
#include "measure.h"

#include <mpi.h>

static void barrier(struct peer *peer) {
    (void)peer;
    MPI_Barrier(MPI_COMM_WORLD);
}

static double greatest(struct peer *peer, double own) {
    (void)peer;
    double all;
    MPI_Allreduce(&own, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return all;
}

static void ping_pong(int rank, float *data, int count) {
    if (rank == 0) {
        MPI_Send(data, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(data, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else if (rank == 1) {
        MPI_Recv(data, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(data, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
    }
}

static void run(struct peer *peer, enum collective collective, float *data, float *output, long elements) {
    MPI_Comm world = MPI_COMM_WORLD;
    int count = (int)elements, rank = peer->rank;
    switch (collective) {
    case ALL_REDUCE: MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, world); break;
    case REDUCE: MPI_Reduce(rank == 0 ? MPI_IN_PLACE : data, data, count, MPI_FLOAT, MPI_SUM, 0, world); break;
    case BROADCAST: MPI_Bcast(data, count, MPI_FLOAT, 0, world); break;
    case ALL_GATHER: MPI_Allgather(data, count, MPI_FLOAT, output, count, MPI_FLOAT, world); break;
    case REDUCE_SCATTER: MPI_Reduce_scatter_block(data, output, count, MPI_FLOAT, MPI_SUM, world); break;
    case GATHER: MPI_Gather(data, count, MPI_FLOAT, output, count, MPI_FLOAT, 0, world); break;
    case SCATTER: MPI_Scatter(data, count, MPI_FLOAT, output, count, MPI_FLOAT, 0, world); break;
    case ALL_TO_ALL: MPI_Alltoall(data, count, MPI_FLOAT, output, count, MPI_FLOAT, world); break;
    case BARRIER: MPI_Barrier(world); break;
    case SEND_RECV:
        if (rank == 0) MPI_Send(data, count, MPI_FLOAT, 1, 0, world);
        if (rank == 1) MPI_Recv(data, count, MPI_FLOAT, 0, 0, world, MPI_STATUS_IGNORE);
        break;
    default: ping_pong(rank, data, count); break;
    }
}

int main(int count, char **arguments) {
    MPI_Init(&count, &arguments);
    struct task task = read_task(count, arguments);
    struct peer peer = {.barrier = barrier, .greatest = greatest, .run = run};
    MPI_Comm_rank(MPI_COMM_WORLD, &peer.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &peer.ranks);
    int status = measure_all(&peer, &task);
    MPI_Finalize();
    return status;
}
