/* MPI_Allreduce while rank r is (r + 1) times a number of microseconds late: eager-SGD's experiment
 * (Li et al., PPoPP 2020, figure 8). Arguments: microseconds, rounds, bytes. Rank 0 prints the mean
 * time of the call over rounds and ranks, in microseconds. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments) {
    MPI_Init(&count, &arguments);
    if (count != 4) {
        fprintf(stderr, "usage: skewed MICROSECONDS ROUNDS BYTES\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    long late_us = atol(arguments[1]), rounds = atol(arguments[2]);
    int elements = atoi(arguments[3]) / (int)sizeof(float), rank, ranks, wrong = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    float *input = malloc((size_t)elements * sizeof(float));
    float *output = malloc((size_t)elements * sizeof(float));
    double waited = 0, all = 0;
    for (long round = 0; round < rounds; round++) {
        for (int element = 0; element < elements; element++) input[element] = (float)(rank + 1);
        MPI_Barrier(MPI_COMM_WORLD);
        usleep((useconds_t)(late_us * (rank + 1)));
        double begin = MPI_Wtime();
        MPI_Allreduce(input, output, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        waited += MPI_Wtime() - begin;
        float sum = (float)(ranks * (ranks + 1) / 2);
        for (int element = 0; element < elements; element++) wrong |= output[element] != sum;
    }
    MPI_Reduce(&waited, &all, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("%.2f\n", all * 1e6 / (double)rounds / ranks);
    free(input);
    free(output);
    MPI_Finalize();
    return wrong;
}
