/* A peer that is killed while others wait for it and hold its tensors: exchange_killed RANK RANKS
   ID-FILE FABRIC. The last rank sends, and ends by SIGKILL. */
#include <signal.h>

#include "exchange.h"

int main(int argc, char **argv) {
    pleachEndpoint_t endpoint;
    pleachPeer_t peer;
    pleachTensor_t held, tensor;
    pleachReceive_t receive;
    char name[4096], address[PLEACH_ADDRESS_BYTES];
    FILE *file;
    long begun;
    int rank, ranks, at;
    CHECK(argc == 5);
    rank = atoi(argv[1]), ranks = atoi(argv[2]);
    endpoint = open_endpoint(argv[4]);
    CHECK((size_t)snprintf(name, sizeof name, "%s.address", argv[3]) < sizeof name);
    if (rank == ranks - 1) {
        char hidden[4096 + 8];
        OK(pleachEndpointAddress(endpoint, address, sizeof address));
        snprintf(hidden, sizeof hidden, "%s.part", name);
        CHECK((file = fopen(hidden, "w")) != NULL && fputs(address, file) >= 0 && fclose(file) == 0);
        CHECK(rename(hidden, name) == 0);
        for (at = 1; at < ranks; ++at) send_numbers(endpoint, 1, "held", 5000, 42);
        all_are_here(argv[3], rank, ranks);
        pause_ms(50); /* so that the others sleep */
        raise(SIGKILL);
    }
    while ((file = fopen(name, "r")) == NULL) pause_ms(1);
    CHECK(fgets(address, sizeof address, file) != NULL && fclose(file) == 0);
    OK(pleachEndpointConnect(endpoint, address, &peer));
    OK(pleachPeerReceive(peer, 1, "held", 0, &held));
    OK(pleachPeerStartReceive(peer, 2, "never", 0, NULL, NULL, &receive));
    all_are_here(argv[3], rank, ranks);
    begun = now_ms();
    EXPECT(pleachRemoteError, pleachReceiveWait(receive, LONG_MS, &tensor));
    CHECK(now_ms() - begun < SOON_MS);
    has_failed(pleachExchangeUnavailable, 2, "never");
    CHECK(strcmp(last_failure().peer, address) == 0);
    SAYS(address);
    EXPECT(pleachRemoteError, pleachPeerReceive(peer, 2, "again", 0, &tensor));
    has_failed(pleachExchangeUnavailable, 2, "again");
    /* What was received stays. */
    CHECK(has_numbers(held, 5000, 42));
    OK(pleachTensorRelease(held));
    OK(pleachPeerClose(peer));
    OK(pleachEndpointClose(endpoint));
    return 0;
}
