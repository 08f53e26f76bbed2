/* Times Open MPI's collectives from C by the protocol of the Python loop: MPI_Barrier before each call, each rank's
 * median, the slowest rank's reported.
 *
 *   mpi_time FILE SECONDS TYPE COLLECTIVE:BYTES...
 *
 * BYTES is what each rank contributes. Rank 0 writes "COLLECTIVE BYTES MICROSECONDS" lines to FILE. all_reduce is in
 * place. SECONDS bounds the time for one case.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <signal.h>
#include <sys/prctl.h>
#endif

enum { WARM_UP = 10, FEWEST = 5, MOST = 2000 };

struct work {
    const char *collective;
    void *in, *out;
    int count, share; /* elements of a rank's input, and of one peer's share of it */
    MPI_Datatype type;
};

static void call(const struct work *w) {
    if (!strcmp(w->collective, "all_gather"))
        MPI_Allgather(w->in, w->count, w->type, w->out, w->count, w->type, MPI_COMM_WORLD);
    else if (!strcmp(w->collective, "all_to_all"))
        MPI_Alltoall(w->in, w->share, w->type, w->out, w->share, w->type, MPI_COMM_WORLD);
    else if (!strcmp(w->collective, "all_reduce"))
        MPI_Allreduce(MPI_IN_PLACE, w->in, w->count, w->type, MPI_SUM, MPI_COMM_WORLD);
    else if (!strcmp(w->collective, "reduce_scatter"))
        MPI_Reduce_scatter_block(w->in, w->out, w->share, w->type, MPI_SUM, MPI_COMM_WORLD);
    else
        MPI_Bcast(w->in, w->count, w->type, 0, MPI_COMM_WORLD);
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* The slowest rank's median over `iterations` calls, in seconds, on every rank. */
static double measure(const struct work *w, double *times, int iterations) {
    for (int i = 0; i < iterations; ++i) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        call(w);
        times[i] = MPI_Wtime() - begin;
    }
    qsort(times, iterations, sizeof *times, compare);
    double median = (times[(iterations - 1) / 2] + times[iterations / 2]) / 2, slowest;
    MPI_Allreduce(&median, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

/* Written memory: what was never written is read from the kernel's one page of zeros. Not zeros, which some CPUs are
 * said to write faster. Sums in place soon reach infinity, which takes no longer to add than a number. */
static void *filled(size_t size_bytes) {
    void *memory = malloc(size_bytes);
    if (!memory) MPI_Abort(MPI_COMM_WORLD, 1);
    return memset(memory, 1, size_bytes);
}

static MPI_Datatype type_of(const char *name) {
    if (!strcmp(name, "float32")) return MPI_FLOAT;
    if (!strcmp(name, "float64")) return MPI_DOUBLE;
    if (!strcmp(name, "int8")) return MPI_INT8_T;
    if (!strcmp(name, "uint8")) return MPI_UINT8_T;
    if (!strcmp(name, "int32")) return MPI_INT32_T;
    if (!strcmp(name, "int64")) return MPI_INT64_T;
    return MPI_BYTE;
}

int main(int argc, char **argv) {
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    MPI_Init(&argc, &argv);
    int rank, ranks, item_bytes;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 5) MPI_Abort(MPI_COMM_WORLD, 2);
    double seconds = atof(argv[2]), times[MOST];
    MPI_Datatype type = type_of(argv[3]);
    MPI_Type_size(type, &item_bytes);
    FILE *file = rank == 0 ? fopen(argv[1], "w") : NULL;
    if (rank == 0 && !file) MPI_Abort(MPI_COMM_WORLD, 1);

    for (int i = 4; i < argc; ++i) {
        char *colon = strchr(argv[i], ':');
        if (!colon) MPI_Abort(MPI_COMM_WORLD, 2);
        *colon = '\0';
        long size_bytes = atol(colon + 1);
        size_t out_bytes = (size_t)size_bytes * (strcmp(argv[i], "all_gather") ? 1 : ranks);
        int count = (int)(size_bytes / item_bytes);
        struct work w = {argv[i], filled(size_bytes), filled(out_bytes), count, count / ranks, type};
        double fitting = seconds / measure(&w, times, WARM_UP);
        int iterations = fitting > MOST ? MOST : fitting < FEWEST ? FEWEST : (int)fitting;
        MPI_Bcast(&iterations, 1, MPI_INT, 0, MPI_COMM_WORLD);
        double slowest = measure(&w, times, iterations);
        if (rank == 0) fprintf(file, "%s %ld %.3f\n", argv[i], size_bytes, slowest * 1e6);
        free(w.in);
        free(w.out);
    }
    if (file) fclose(file);
    MPI_Finalize();
    return 0;
}
