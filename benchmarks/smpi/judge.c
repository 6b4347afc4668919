/* Simulated ranks for SimGrid's SMPI: a sweep of one collective, or an iteration that a plan file describes.

   judge sweep OPERATION STRIDE BYTES...   the world's ranks in groups of every STRIDE-th rank: the first group alone,
                                           then, where STRIDE > 1, all groups at once
   judge iteration PLAN                    two processes a rank: even ones compute, odd ones communicate

   Prints one line a result. Nothing but messages and sleeps takes simulated time (smpi/simulate-computation:no), so
   results do not depend on the host. Buffers are shared among ranks and sums are not computed: data do not matter here,
   bytes do. */

#include <mpi.h>
#include <smpi/smpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void no_sum(void *in, void *out, int *count, MPI_Datatype *type) {
    (void)in, (void)out, (void)count, (void)type;
}

struct buffers {
    MPI_Op sum;
    void *sent, *received;
};

static void fail(const char *what, const char *where) {
    fprintf(stderr, "judge: %s: %s\n", what, where);
    MPI_Abort(MPI_COMM_WORLD, 2);
    exit(2);
}

/* Bytes of the largest buffer of a collective, as paradl_bench counts its message. */
static size_t buffer_bytes(const char *operation, size_t bytes, int ranks) {
    int parts = !strcmp(operation, "all_gather") || !strcmp(operation, "reduce_scatter");
    return parts ? bytes * ranks : bytes;
}

/* One pair for all ranks, which are threads of one process (smpirun -no-privatize): 1,024 ranks with buffers of their
   own take more mappings than Linux allows. SMPI copies nothing between memory that it knows as shared. */
static struct buffers make_buffers(size_t bytes) {
    static struct buffers made;
    static size_t held;
    if (bytes + 4 > held) {
        /* It shares no less than a block. */
        held = bytes + 4 < 4096 ? 4096 : bytes + 4;
        made.sent = SMPI_SHARED_MALLOC(held);
        made.received = SMPI_SHARED_MALLOC(held);
    }
    struct buffers own = made;
    MPI_Op_create(no_sum, 1, &own.sum);
    return own;
}

/* Message sizes are as paradl_bench defines them: of all_gather what a rank contributes, of reduce_scatter what it
   keeps. Bytes that are no whole float are sent as one more. send_recv goes to the last rank and back. */
static void collective(const char *operation, size_t bytes, MPI_Comm group, struct buffers *own) {
    int rank, ranks, count = (int)((bytes + 3) / 4);
    MPI_Comm_rank(group, &rank);
    MPI_Comm_size(group, &ranks);
    if (!strcmp(operation, "all_reduce"))
        MPI_Allreduce(own->sent, own->received, count, MPI_FLOAT, own->sum, group);
    else if (!strcmp(operation, "all_gather"))
        MPI_Allgather(own->sent, count, MPI_FLOAT, own->received, count, MPI_FLOAT, group);
    else if (!strcmp(operation, "reduce_scatter"))
        MPI_Reduce_scatter_block(own->sent, own->received, count, MPI_FLOAT, own->sum, group);
    else if (!strcmp(operation, "broadcast"))
        MPI_Bcast(own->sent, count, MPI_FLOAT, 0, group);
    else if (!strcmp(operation, "reduce"))
        MPI_Reduce(own->sent, own->received, count, MPI_FLOAT, own->sum, 0, group);
    else if (strcmp(operation, "send_recv"))
        fail("no such operation", operation);
    else if (rank == 0 || rank == ranks - 1) {
        int other = rank ? 0 : ranks - 1;
        if (rank == 0)
            MPI_Send(own->sent, count, MPI_FLOAT, other, 0, group);
        MPI_Recv(own->received, count, MPI_FLOAT, other, 0, group, MPI_STATUS_IGNORE);
        if (rank)
            MPI_Send(own->sent, count, MPI_FLOAT, other, 0, group);
    }
}

/* To the nanosecond; smpi_execute would share the host's cores among its ranks. */
static void pass(double seconds) {
    struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    smpi_nanosleep(&time, NULL);
}

/* All ranks of the world go on at one instant: a barrier alone lets them go one after the other. */
static double common_start(void) {
    double now = MPI_Wtime(), last, start;
    MPI_Allreduce(&now, &last, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    start = last + 1.0;
    pass(start - MPI_Wtime());
    return start;
}

static void print_times(const char *operation, size_t bytes, int together, double seconds) {
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    double *all = rank == 0 ? malloc(ranks * sizeof *all) : NULL;
    MPI_Gather(&seconds, 1, MPI_DOUBLE, all, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    if (rank)
        return;
    printf("RESULT %s %zu %d", operation, bytes, together);
    for (int each = 0; each < ranks; each++)
        printf(" %.6e", all[each]);
    printf("\n");
    fflush(stdout);
    free(all);
}

static void sweep(int argc, char **argv) {
    const char *operation = argv[2];
    int stride = atoi(argv[3]), rank, ranks;
    size_t largest = 0;
    MPI_Comm group;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (stride < 1 || ranks % stride)
        fail("STRIDE does not divide the ranks", argv[3]);
    MPI_Comm_split(MPI_COMM_WORLD, rank % stride, rank, &group);
    for (int at = 4; at < argc; at++) {
        size_t bytes = buffer_bytes(operation, strtoull(argv[at], NULL, 10), ranks / stride);
        largest = bytes > largest ? bytes : largest;
    }
    struct buffers own = make_buffers(largest);
    for (int at = 4; at < argc; at++)
        for (int together = 0; together <= (stride > 1); together++) {
            size_t bytes = strtoull(argv[at], NULL, 10);
            double start = common_start();
            if (together || rank % stride == 0)
                collective(operation, bytes, group, &own);
            double seconds = MPI_Wtime() - start;
            /* There and back: a send that is buffered ends before anything has arrived. */
            print_times(operation, bytes, together ? stride : 1, strcmp(operation, "send_recv") ? seconds : seconds / 2);
        }
}

/* A task of the plan. */
struct task {
    int stream, group, dependencies, *waits_for, *tells;
    char operation[24];
    double seconds;
    size_t bytes;
};

struct plan {
    int ranks, groups, roles, *colours, *role_of, *tasks;
    struct task **of_role;
};

static int read_int(FILE *file, const char *path) {
    int value;
    if (fscanf(file, "%d", &value) != 1)
        fail("plan file ends early", path);
    return value;
}

static void read_task(FILE *file, const char *path, struct task *task, int tasks) {
    if (fscanf(file, "%d %23s %lf %zu %d %d", &task->stream, task->operation, &task->seconds, &task->bytes, &task->group,
               &task->dependencies) != 6)
        fail("plan file ends early", path);
    task->waits_for = malloc((task->dependencies + 1) * sizeof(int));
    task->tells = calloc(2, sizeof(int));
    for (int at = 0; at < task->dependencies; at++) {
        task->waits_for[at] = read_int(file, path);
        if (task->waits_for[at] < 0 || task->waits_for[at] >= tasks)
            fail("a task waits for none of the plan", path);
    }
}

/* ranks groups roles; colours of every rank, a row a group; the role of every rank; the roles' tasks. Only
   dependencies between streams are listed. */
static struct plan read_plan(const char *path) {
    FILE *file = fopen(path, "r");
    struct plan plan;
    if (!file)
        fail("cannot read", path);
    plan.ranks = read_int(file, path);
    plan.groups = read_int(file, path);
    plan.roles = read_int(file, path);
    plan.colours = malloc((size_t)(plan.groups + 1) * plan.ranks * sizeof(int));
    plan.role_of = malloc(plan.ranks * sizeof(int));
    plan.tasks = malloc(plan.roles * sizeof(int));
    plan.of_role = malloc(plan.roles * sizeof(struct task *));
    for (int at = 0; at < plan.groups * plan.ranks; at++)
        plan.colours[at] = read_int(file, path);
    for (int at = 0; at < plan.ranks; at++)
        plan.role_of[at] = read_int(file, path);
    for (int role = 0; role < plan.roles; role++) {
        plan.tasks[role] = read_int(file, path);
        plan.of_role[role] = malloc((plan.tasks[role] + 1) * sizeof(struct task));
        for (int at = 0; at < plan.tasks[role]; at++)
            read_task(file, path, &plan.of_role[role][at], plan.tasks[role]);
        for (int at = 0; at < plan.tasks[role]; at++) {
            struct task *own = &plan.of_role[role][at];
            for (int each = 0; each < own->dependencies; each++)
                plan.of_role[role][own->waits_for[each]].tells[own->stream] = 1;
        }
    }
    fclose(file);
    return plan;
}

/* Runs one stream's tasks in order. What the other stream waits for is told it by an empty message tagged with the
   task's number. */
static double run_stream(struct task *tasks, int count, int stream, int other, MPI_Comm *groups,
                         struct buffers *own) {
    char *done = calloc(count + 1, 1), nothing = 0;
    double waited = 0.0;
    for (int at = 0; at < count; at++) {
        struct task *task = &tasks[at];
        if (task->stream != stream)
            continue;
        double before = MPI_Wtime();
        for (int each = 0; each < task->dependencies; each++) {
            int from = task->waits_for[each];
            if (!done[from])
                MPI_Recv(&nothing, 0, MPI_CHAR, other, from, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            done[from] = 1;
        }
        waited += MPI_Wtime() - before;
        if (!strcmp(task->operation, "compute")) {
            pass(task->seconds);
        } else
            collective(task->operation, task->bytes, groups[task->group], own);
        if (task->tells[!stream])
            MPI_Send(&nothing, 0, MPI_CHAR, other, at, MPI_COMM_WORLD);
    }
    free(done);
    return waited;
}

static void iteration(const char *path) {
    struct plan plan = read_plan(path);
    int rank, ranks;
    size_t largest = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (ranks != 2 * plan.ranks)
        fail("the plan is of another number of ranks, each of which takes two processes", path);
    int place = rank / 2, stream = rank % 2, role = plan.role_of[place];
    MPI_Comm *groups = malloc((plan.groups + 1) * sizeof(MPI_Comm));
    for (int group = 0; group < plan.groups; group++) {
        int colour = plan.colours[group * plan.ranks + place];
        MPI_Comm_split(MPI_COMM_WORLD, stream && colour >= 0 ? colour : MPI_UNDEFINED, place, &groups[group]);
    }
    for (int at = 0; at < plan.tasks[role]; at++) {
        struct task *task = &plan.of_role[role][at];
        size_t bytes = task->stream ? buffer_bytes(task->operation, task->bytes, plan.ranks) : 0;
        largest = bytes > largest ? bytes : largest;
    }
    struct buffers own = make_buffers(largest);
    double start = common_start();
    double waited = run_stream(plan.of_role[role], plan.tasks[role], stream, rank ^ 1, groups, &own);
    double seconds = MPI_Wtime() - start;
    print_times("iteration", 0, 1, seconds);
    print_times("waited", 0, 1, waited);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc >= 5 && !strcmp(argv[1], "sweep"))
        sweep(argc, argv);
    else if (argc == 3 && !strcmp(argv[1], "iteration"))
        iteration(argv[2]);
    else
        fail("usage", "judge sweep OPERATION STRIDE BYTES... | judge iteration PLAN");
    MPI_Finalize();
    return 0;
}
