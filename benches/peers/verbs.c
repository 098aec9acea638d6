/* A ping-pong by hand on libibverbs: what a signal costs at least. Each turn is one RDMA write with
 * immediate of so many bytes, carried in the request, whose receive the other end finds by polling
 * its completion queue; payload bytes are never polled, as the device contract has it (ib_write_lat
 * of perftest polls them).
 *
 * Arguments: DEVICE GID-INDEX PORT BYTES TURNS [HOST]. Without HOST it waits at PORT for the one
 * with. That one prints one JSON object: the median of half a turn there and back, in us. Needs
 * -libverbs.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DEPTH 64 /* receives that are posted */
#define WARMUP 100
#define BYTES_MAX 4096
#define INLINE_BYTES_MAX 64
#define SIGNAL_EVERY 16 /* requests between two that ask for a completion */

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* What an end tells the other one. */
struct hello {
    uint32_t queue_pair, packet, key;
    uint64_t address;
    union ibv_gid gid;
};

static struct ibv_context *open_device(const char *name) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    for (int index = 0; list && list[index]; index++) {
        if (strcmp(ibv_get_device_name(list[index]), name) == 0) return ibv_open_device(list[index]);
    }
    return NULL;
}

static int meet(int port, const char *host) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (host && inet_pton(AF_INET, host, &address.sin_addr) != 1) fail("HOST");
    int meeting = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (host) {
        for (int attempt = 0; connect(meeting, (struct sockaddr *)&address, sizeof address); attempt++) {
            if (attempt == 600) fail("connect");
            usleep(50000);
        }
        return meeting;
    }
    setsockopt(meeting, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(meeting, (struct sockaddr *)&address, sizeof address) || listen(meeting, 1)) fail("listen");
    return accept(meeting, NULL, NULL);
}

static void exchange(int meeting, const void *own, void *other, size_t bytes) {
    if (write(meeting, own, bytes) != (ssize_t)bytes) fail("write");
    for (size_t at = 0; at < bytes;) {
        ssize_t came = read(meeting, (char *)other + at, bytes - at);
        if (came <= 0) fail("read");
        at += (size_t)came;
    }
}

static void join(struct ibv_qp *pair, const struct hello *own, const struct hello *other, int gid_index, enum ibv_mtu mtu) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = other->queue_pair,
                               .rq_psn = other->packet, .max_dest_rd_atomic = 1, .min_rnr_timer = 12};
    attr.ah_attr.port_num = 1;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = other->gid;
    attr.ah_attr.grh.sgid_index = (uint8_t)gid_index;
    attr.ah_attr.grh.hop_limit = 64;
    if (ibv_modify_qp(pair, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        fail("ready to receive");
    attr.qp_state = IBV_QPS_RTS;
    attr.sq_psn = own->packet;
    attr.timeout = 17;
    attr.retry_cnt = 6;
    attr.rnr_retry = 6;
    attr.max_rd_atomic = 1;
    if (ibv_modify_qp(pair, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                       IBV_QP_MAX_QP_RD_ATOMIC))
        fail("ready to send");
}

static void receive(struct ibv_qp *pair, int count) {
    struct ibv_recv_wr empty = {0}, *bad;
    while (count--) {
        if (ibv_post_recv(pair, &empty, &bad)) fail("post a receive");
    }
}

static void send_one(struct ibv_qp *pair, struct ibv_mr *own, const struct hello *other, uint32_t bytes, long number) {
    struct ibv_sge list = {(uintptr_t)own->addr, bytes, own->lkey};
    struct ibv_send_wr request = {.sg_list = &list, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .imm_data = htonl(7)}, *bad;
    request.send_flags = (bytes <= INLINE_BYTES_MAX ? IBV_SEND_INLINE : 0) | (number % SIGNAL_EVERY ? 0 : IBV_SEND_SIGNALED);
    request.wr.rdma.remote_addr = other->address;
    request.wr.rdma.rkey = other->key;
    if (ibv_post_send(pair, &request, &bad)) fail("post a request");
}

/* Polls until a signal has come. */
static void wait_one(struct ibv_cq *queue, struct ibv_qp *pair) {
    for (;;) {
        struct ibv_wc found;
        int count = ibv_poll_cq(queue, 1, &found);
        if (count < 0) fail("poll");
        if (count == 0) continue;
        if (found.status != IBV_WC_SUCCESS) {
            fprintf(stderr, "work failed: %s\n", ibv_wc_status_str(found.status));
            exit(1);
        }
        if (found.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
            receive(pair, 1);
            return;
        }
    }
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int by_value(const void *one, const void *other) {
    double difference = *(const double *)one - *(const double *)other;
    return (difference > 0) - (difference < 0);
}

int main(int count, char **arguments) {
    if (count < 6) return fprintf(stderr, "usage: verbs DEVICE GID-INDEX PORT BYTES TURNS [HOST]\n"), 2;
    int gid_index = atoi(arguments[2]), port = atoi(arguments[3]);
    uint32_t bytes = (uint32_t)atoi(arguments[4]);
    long turns = atol(arguments[5]);
    const char *host = count > 6 ? arguments[6] : NULL;
    if (bytes == 0 || bytes > BYTES_MAX || turns <= 0) return 2;
    struct ibv_context *context = open_device(arguments[1]);
    if (!context) fail(arguments[1]);
    struct ibv_port_attr attributes;
    if (ibv_query_port(context, 1, &attributes)) fail("port");
    static char memory[BYTES_MAX] __attribute__((aligned(4096)));
    struct ibv_pd *domain = ibv_alloc_pd(context);
    struct ibv_mr *region = ibv_reg_mr(domain, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    struct ibv_cq *queue = ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0);
    struct ibv_qp_init_attr wanted = {.send_cq = queue, .recv_cq = queue, .qp_type = IBV_QPT_RC};
    wanted.cap.max_send_wr = DEPTH;
    wanted.cap.max_recv_wr = DEPTH;
    wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
    wanted.cap.max_inline_data = INLINE_BYTES_MAX;
    struct ibv_qp *pair = region && queue ? ibv_create_qp(domain, &wanted) : NULL;
    if (!pair) fail("a queue pair");
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
    if (ibv_modify_qp(pair, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) fail("init");
    receive(pair, DEPTH);

    struct hello own = {pair->qp_num, (uint32_t)getpid() & 0xffffff, region->rkey, (uintptr_t)memory, {{0}}}, other;
    if (ibv_query_gid(context, 1, gid_index, &own.gid)) fail("GID");
    int meeting = meet(port, host);
    exchange(meeting, &own, &other, sizeof own);
    join(pair, &own, &other, gid_index, attributes.active_mtu);
    char ready = 1;
    exchange(meeting, &ready, &ready, 1);

    double *times = calloc((size_t)turns, sizeof *times);
    for (long turn = -WARMUP; turn < turns; turn++) {
        double began = now_us();
        if (host) send_one(pair, region, &other, bytes, turn + WARMUP);
        wait_one(queue, pair);
        if (!host) send_one(pair, region, &other, bytes, turn + WARMUP);
        if (turn >= 0) times[turn] = (now_us() - began) / 2;
    }
    exchange(meeting, &ready, &ready, 1);
    qsort(times, (size_t)turns, sizeof *times, by_value);
    if (host) printf("{\"bytes\":%u,\"turns\":%ld,\"median_us\":%.3f}\n", bytes, turns, times[turns / 2]);
    return 0;
}
