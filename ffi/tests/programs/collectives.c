/* Every collective, in place and not, in groups and alone: collectives RANK RANKS ID-FILE. */
#include "meet.h"

#define COUNT 1000

static int ranks, rank;
static pleachComm_t comm;

static float value(int of, size_t index) { return (float)(of + 1) * (float)(index % 97); }

static float sum(size_t index) {
    float total = 0;
    int of;
    for (of = 0; of < ranks; ++of) total += value(of, index);
    return total;
}

static float *filled(size_t count, size_t first) {
    float *data = malloc((count + 1) * sizeof *data);
    size_t index;
    CHECK(data != NULL);
    for (index = 0; index < count; ++index) data[index] = value(rank, first + index);
    return data;
}

static float *empty(size_t count) {
    float *data = malloc((count + 1) * sizeof *data);
    size_t index;
    CHECK(data != NULL);
    for (index = 0; index < count; ++index) data[index] = -1;
    return data;
}

static void reductions(void) {
    float *in = filled(COUNT, 0), *out = empty(COUNT), *same = filled(COUNT, 0), factor = 2;
    pleachRedOp_t doubled, gone;
    size_t index;
    OK(pleachAllReduce(in, out, COUNT, pleachFloat32, pleachSum, comm, NULL));
    OK(pleachAllReduce(same, same, COUNT, pleachFloat32, pleachSum, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(out[index] == sum(index) && same[index] == sum(index));
    OK(pleachAllReduce(in, out, COUNT, pleachFloat32, pleachMax, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(out[index] == value(ranks - 1, index));
    OK(pleachAllReduce(in, out, COUNT, pleachFloat32, pleachMin, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(out[index] == value(0, index));
    OK(pleachRedOpCreatePreMulSum(&doubled, &factor, pleachFloat32, pleachScalarHostImmediate, comm));
    OK(pleachAllReduce(in, out, COUNT, pleachFloat32, doubled, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(out[index] == 2 * sum(index));
    gone = doubled;
    OK(pleachRedOpDestroy(doubled, comm));
    EXPECT(pleachInvalidArgument, pleachRedOpDestroy(gone, comm));
    EXPECT(pleachInvalidArgument, pleachAllReduce(in, out, COUNT, pleachFloat32, gone, comm, NULL));
    memset(out, 0, COUNT * sizeof *out);
    OK(pleachReduce(in, rank == 1 ? out : NULL, COUNT, pleachFloat32, pleachSum, 1, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(out[index] == (rank == 1 ? sum(index) : 0));
    free(in), free(out), free(same);
}

static void blocks(void) {
    size_t all = (size_t)ranks * COUNT, own = (size_t)rank * COUNT, index;
    float *part = filled(COUNT, own), *whole = filled(all, 0), *out = empty(all), *one = empty(COUNT);
    OK(pleachReduceScatter(whole, one, COUNT, pleachFloat32, pleachSum, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(one[index] == sum(own + index));
    OK(pleachReduceScatter(whole, whole + own, COUNT, pleachFloat32, pleachSum, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(whole[own + index] == sum(own + index));
    OK(pleachAllGather(part, out, COUNT, pleachFloat32, comm, NULL));
    for (index = 0; index < all; ++index) CHECK(out[index] == value((int)(index / COUNT), index));
    memcpy(whole + own, part, COUNT * sizeof *part);
    OK(pleachAllGather(whole + own, whole, COUNT, pleachFloat32, comm, NULL));
    CHECK(memcmp(whole, out, all * sizeof *out) == 0);
    OK(pleachAlltoAll(out, whole, COUNT, pleachFloat32, comm, NULL));
    for (index = 0; index < all; ++index) CHECK(whole[index] == value(rank, own + index % COUNT));
    OK(pleachGather(part, rank == 0 ? whole : NULL, COUNT, pleachFloat32, 0, comm, NULL));
    CHECK(rank != 0 || memcmp(whole, out, all * sizeof *out) == 0);
    OK(pleachScatter(rank == 1 ? out : NULL, one, COUNT, pleachFloat32, 1, comm, NULL));
    CHECK(memcmp(one, part, COUNT * sizeof *one) == 0);
    if (rank != 0) memset(one, 0, COUNT * sizeof *one);
    OK(pleachBroadcast(rank == 0 ? one : NULL, one, COUNT, pleachFloat32, 0, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(one[index] == value(0, index));
    memcpy(one, part, COUNT * sizeof *one);
    OK(pleachBcast(one, COUNT, pleachFloat32, 1, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(one[index] == value(1, COUNT + index));
    free(part), free(whole), free(out), free(one);
}

/* Block r has r + 1 elements. */
static void blocks_of_different_lengths(void) {
    size_t counts[64], send[64], receive[64], all = 0, before = 0, index;
    int of;
    float *part, *out, *whole;
    for (of = 0; of < ranks; ++of) {
        counts[of] = (size_t)of + 1;
        if (of < rank) before += counts[of];
        all += counts[of];
    }
    part = filled(counts[rank], before), out = empty(all), whole = filled(all, 0);
    OK(pleachAllGatherV(part, out, counts, pleachFloat32, comm, NULL));
    for (of = 0, index = 0; of < ranks; ++of) {
        size_t end = index + counts[of];
        for (; index < end; ++index) CHECK(out[index] == value(of, index));
    }
    OK(pleachReduceScatterV(whole, part, counts, pleachFloat32, pleachSum, comm, NULL));
    for (index = 0; index < counts[rank]; ++index) CHECK(part[index] == sum(before + index));
    /* To the last rank, and from it. */
    free(part);
    part = filled(counts[rank], before);
    memset(out, 0, all * sizeof *out);
    OK(pleachGatherV(part, rank == ranks - 1 ? out : NULL, counts, pleachFloat32, ranks - 1, comm, NULL));
    for (of = 0, index = 0; of < ranks; ++of) {
        size_t end = index + counts[of];
        for (; index < end; ++index) CHECK(out[index] == (rank == ranks - 1 ? value(of, index) : 0));
    }
    OK(pleachScatterV(rank == ranks - 1 ? whole : NULL, part, counts, pleachFloat32, ranks - 1, comm, NULL));
    for (index = 0; index < counts[rank]; ++index) CHECK(part[index] == value(ranks - 1, before + index));
    /* As many elements to each rank as its block has, so this rank's count from each. */
    for (of = 0; of < ranks; ++of) send[of] = counts[of], receive[of] = counts[rank];
    free(out);
    out = empty((size_t)ranks * counts[rank]);
    OK(pleachAlltoAllV(whole, send, out, receive, pleachFloat32, comm, NULL));
    for (of = 0; of < ranks; ++of)
        for (index = 0; index < counts[rank]; ++index)
            CHECK(out[(size_t)of * counts[rank] + index] == value(of, before + index));
    free(part), free(out), free(whole);
}

static void messages(void) {
    int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks, round;
    int64_t *sent = malloc(COUNT * sizeof *sent), *got = malloc(COUNT * sizeof *got);
    size_t index;
    CHECK(sent != NULL && got != NULL);
    for (round = 0; round < 20; ++round) {
        for (index = 0; index < COUNT; ++index) sent[index] = rank * 1000 + round;
        /* Around in a circle, which would wait for ever outside of a group. */
        OK(pleachGroupStart());
        OK(pleachGroupStart());
        OK(pleachSend(sent, COUNT, pleachInt64, next, comm, NULL));
        OK(pleachGroupEnd());
        OK(pleachRecv(got, COUNT, pleachInt64, last, comm, NULL));
        OK(pleachGroupEnd());
        for (index = 0; index < COUNT; ++index) CHECK(got[index] == last * 1000 + round);
    }
    free(sent), free(got);
}

static void divided(void) {
    pleachComm_t half = comm, none = comm;
    int32_t one = 1, total = 0;
    int count = 0, own = -1;
    OK(pleachCommSplit(comm, rank % 2, -rank, &half, NULL));
    OK(pleachCommCount(half, &count));
    OK(pleachCommUserRank(half, &own));
    CHECK(count == (ranks + (rank % 2 == 0)) / 2);
    CHECK(own == count - 1 - rank / 2); /* the highest rank has the lowest key */
    OK(pleachAllReduce(&one, &total, 1, pleachInt32, pleachSum, half, NULL));
    CHECK(total == count);
    /* Two communicators in one group of calls. */
    OK(pleachGroupStart());
    OK(pleachAllReduce(&one, &total, 1, pleachInt32, pleachSum, half, NULL));
    OK(pleachAllReduce(&one, &one, 1, pleachInt32, pleachSum, comm, NULL));
    OK(pleachGroupEnd());
    CHECK(one == ranks);
    OK(pleachCommSplit(comm, PLEACH_SPLIT_NOCOLOR, 0, &none, NULL));
    CHECK(none == NULL);
    OK(pleachCommFinalize(half));
    OK(pleachCommDestroy(half));
    EXPECT(pleachInvalidArgument, pleachBarrier(half, NULL));
    SAYS("destroyed");
}

int main(int argc, char **argv) {
    pleachUniqueId id;
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    pleachResult_t error;
    pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
    int count = 0, own = -1;
    CHECK(argc == 4);
    rank = atoi(argv[1]), ranks = atoi(argv[2]);
    share_id(argv[3], rank, &id);
    config.timeoutMs = 30000;
    OK(pleachCommInitRankConfig(&comm, ranks, id, rank, &config));
    OK(pleachCommCount(comm, &count));
    OK(pleachCommUserRank(comm, &own));
    CHECK(count == ranks && own == rank);
    OK(pleachBarrier(comm, NULL));
    reductions();
    blocks();
    blocks_of_different_lengths();
    messages();
    divided();
    OK(pleachCommGetAsyncError(comm, &error));
    CHECK(error == pleachSuccess);
    OK(pleachCommGetFailure(comm, &failure));
    CHECK(failure.kind == pleachFailureNone);
    OK(pleachCommFinalize(comm));
    EXPECT(pleachInvalidUsage, pleachBarrier(comm, NULL));
    OK(pleachCommDestroy(comm));
    EXPECT(pleachInvalidArgument, pleachCommDestroy(comm));
    return 0;
}
