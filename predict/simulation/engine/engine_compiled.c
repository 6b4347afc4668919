/* The event loop of predict/simulation/engine/engine_python.py, compiled: the same steps in the same order.

   A lane is a stream of a role, or one more, and runs its tasks one at a time. All that is under way stands in a heap by when it
   ends; a lane's place in it changes only where the lane itself, or the one that it is slowed beside, starts or ends.
   As a rule a task that ends lets another one start: that one takes the place which the former leaves on top.

   Arrays come through the buffer protocol: int32 for indices, float64 for seconds. Of the limited API, so that one
   build serves every Python from 3.11 on. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Of run_events and what it does; predict/simulation/engine/engine_python.py has the same number, and a build of another is not used.
   To be raised in both with whatever changes it. */
#define INTERFACE 3

typedef struct {
    double left;    /* seconds alone, as of since */
    double since;   /* when left was true */
    double stretch; /* how many times longer it takes now */
    double ends;    /* when it ends if nothing changes */
    int32_t task;   /* -1: idle */
    int32_t next, stop; /* what is left of the queue */
    int32_t place;  /* in the heap; -1: not there */
    int32_t role;
} Lane;

typedef struct {
    double ends; /* of the lane, beside its number: comparing looks at no lane */
    int32_t lane;
} Entry;

typedef struct {
    double overlap, exposed, since;
} Beside;

typedef struct {
    const int32_t *queue, *follower_start, *followers;
    const double *seconds, *slow_compute, *slow_communication;
    double *start, *end;
    int32_t *waits_for, *lane_of;
    Entry *heap;
    Lane *lanes;
    Beside *beside;
    double now;
    int32_t width, compute, communication; /* lanes of a role, and which of them slow each other */
    int32_t blocking;                       /* the one whose tasks are slowed beside those of communication */
    int32_t active;
    Py_ssize_t finished; /* of all rows */
    int32_t ended; /* the idle lane that is still on top of the heap; -1: none */
} Run;

static void set_place(Run *run, int32_t place, Entry entry) {
    run->heap[place] = entry;
    run->lanes[entry.lane].place = place;
}

static void sift_up(Run *run, int32_t place, Entry entry) {
    while (place > 0) {
        int32_t above = (place - 1) / 2;
        if (run->heap[above].ends <= entry.ends) break;
        set_place(run, place, run->heap[above]);
        place = above;
    }
    set_place(run, place, entry);
}

/* Returns where it came to stand. */
static int32_t sift_down(Run *run, int32_t place, Entry entry) {
    const Entry *heap = run->heap;
    for (;;) {
        int32_t below = 2 * place + 1;
        if (below >= run->active) break;
        if (below + 1 < run->active) below += heap[below + 1].ends < heap[below].ends;
        if (heap[below].ends >= entry.ends) break;
        set_place(run, place, heap[below]);
        place = below;
    }
    set_place(run, place, entry);
    return place;
}

static void move(Run *run, int32_t place, Entry entry) { sift_up(run, sift_down(run, place, entry), entry); }

static void put(Run *run, int32_t index) {
    Lane *lane = &run->lanes[index];
    Entry entry = {lane->ends, index};
    if (lane->place < 0 && run->ended < 0) {
        sift_up(run, run->active++, entry);
    } else if (lane->place < 0 || index == run->ended) {
        run->lanes[run->ended].place = -1;
        run->ended = -1;
        sift_down(run, 0, entry);
    } else {
        move(run, lane->place, entry);
    }
}

static void take_out(Run *run, int32_t index) {
    int32_t place = run->lanes[index].place;
    Entry last = run->heap[--run->active];
    run->lanes[index].place = -1;
    if (last.lane != index) move(run, place, last);
}

/* Count the time since the role's lanes last changed, before they change again. */
static void count_beside(Run *run, int32_t role) {
    const Lane *lanes = run->lanes + (size_t)role * run->width;
    Beside *beside = &run->beside[role];
    if (beside->since == run->now) return;
    if (lanes[run->communication].task >= 0 || lanes[run->blocking].task >= 0) {
        double passed = run->now - beside->since;
        if (lanes[run->compute].task >= 0) beside->overlap += passed;
        else beside->exposed += passed;
    }
    beside->since = run->now;
}

static void stretch_to(Run *run, int32_t index, double stretch) {
    Lane *lane = &run->lanes[index];
    if (lane->task < 0 || lane->stretch == stretch) return;
    lane->left -= (run->now - lane->since) / lane->stretch;
    if (lane->left < 0) lane->left = 0;
    lane->since = run->now;
    lane->stretch = stretch;
    lane->ends = run->now + lane->left * stretch;
    put(run, index);
}

static void set_rates(Run *run, int32_t role) {
    int32_t compute = role * run->width + run->compute, other = role * run->width + run->communication;
    int32_t blocking = role * run->width + run->blocking;
    int32_t exchange = run->lanes[other].task, call = run->lanes[blocking].task;
    if (call >= 0) stretch_to(run, blocking, exchange >= 0 ? run->slow_communication[call] : 1.0);
    if (exchange >= 0 && run->lanes[compute].task >= 0) {
        stretch_to(run, compute, run->slow_compute[exchange]);
        stretch_to(run, other, run->slow_communication[exchange]);
    } else {
        stretch_to(run, compute, 1.0);
        stretch_to(run, other, 1.0);
    }
}

/* Start the next task of an idle lane if nothing holds it back; whether it did. */
static int start_next(Run *run, int32_t index) {
    Lane *lane = &run->lanes[index];
    int32_t task;
    if (lane->task >= 0 || lane->next >= lane->stop) return 0;
    task = run->queue[lane->next];
    if (run->waits_for[task]) return 0;
    count_beside(run, lane->role);
    lane->next++;
    lane->task = task;
    lane->left = run->seconds[task];
    lane->since = run->now;
    lane->stretch = 1.0;
    lane->ends = run->now + lane->left;
    run->start[task] = run->now;
    put(run, index);
    return 1;
}

static void finish_first(Run *run) {
    int32_t index = run->heap[0].lane;
    Lane *lane = &run->lanes[index];
    int32_t task = lane->task;
    run->now = lane->ends;
    count_beside(run, lane->role);
    run->end[task] = run->now;
    run->finished++;
    lane->task = -1;
    /* Nothing ends before now, so that it stays on top until another one takes its place. */
    run->ended = index;
    start_next(run, index);
    set_rates(run, lane->role);
    for (int32_t at = run->follower_start[task]; at < run->follower_start[task + 1]; at++) {
        int32_t follower = run->followers[at];
        if (--run->waits_for[follower] == 0 && start_next(run, run->lane_of[follower]))
            set_rates(run, run->lanes[run->lane_of[follower]].role);
    }
    if (run->ended >= 0) take_out(run, index);
    run->ended = -1;
}

/* Whether every index points at something, so that no array is read beyond its end. */
static int is_valid(const int32_t *starts, Py_ssize_t rows, const int32_t *items, Py_ssize_t count, Py_ssize_t tasks) {
    if (starts[0] != 0 || starts[rows] != count) return 0;
    for (Py_ssize_t row = 0; row < rows; row++)
        if (starts[row + 1] < starts[row]) return 0;
    for (Py_ssize_t at = 0; at < count; at++)
        if (items[at] < 0 || items[at] >= tasks) return 0;
    return 1;
}

static void start_all(Run *run, const int32_t *lane_start, int32_t lanes) {
    for (int32_t index = 0; index < lanes; index++) {
        Lane *lane = &run->lanes[index];
        lane->task = lane->place = -1;
        lane->role = index / run->width;
        lane->next = lane_start[index];
        lane->stop = lane_start[index + 1];
        for (int32_t at = lane->next; at < lane->stop; at++) run->lane_of[run->queue[at]] = index;
    }
    for (int32_t index = 0; index < lanes; index++)
        if (start_next(run, index)) set_rates(run, run->lanes[index].role);
}

enum { LANE_START, QUEUE, WAITS_FOR, FOLLOWER_START, FOLLOWERS, SECONDS, SLOW_COMPUTE, SLOW_COMMUNICATION,
       START, END, OVERLAP, EXPOSED, ARRAYS };

/* Whether items are native signed integers, or floating-point numbers; their size is for the caller to compare.
   Without a format they are bytes. */
static int is_native(const char *format, int integers) {
    if (!format) return 0;
    if (*format == '@' || *format == '=') format++;
    return *format && !format[1] && strchr(integers ? "il" : "d", *format);
}

/* Buffers of all arrays, or nothing and an exception. */
static int open_arrays(PyObject *const *objects, Py_buffer *views) {
    for (int i = 0; i < ARRAYS; i++) {
        int writable = i >= START;
        Py_ssize_t size = i < SECONDS ? (Py_ssize_t)sizeof(int32_t) : (Py_ssize_t)sizeof(double);
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
        int opened = PyObject_GetBuffer(objects[i], &views[i], flags) == 0;
        if (opened && views[i].itemsize == size && is_native(views[i].format, i < SECONDS)) continue;
        if (opened)
            PyErr_Format(PyExc_TypeError, "array %d has items of another type than %s of %zd bytes", i,
                         i < SECONDS ? "int" : "float", size);
        for (int done = opened ? i : i - 1; done >= 0; done--) PyBuffer_Release(&views[done]);
        return 0;
    }
    return 1;
}

static int lengths_agree(const Py_ssize_t *length, Py_ssize_t lanes, Py_ssize_t tasks, int width, int rows) {
    if (lanes < 0 || lanes % width || tasks > INT32_MAX - 1 || lanes > INT32_MAX - 1) return 0;
    if (length[WAITS_FOR] != tasks || length[FOLLOWER_START] != tasks + 1) return 0;
    for (int i = SECONDS; i <= SLOW_COMMUNICATION; i++)
        if (length[i] != tasks && length[i] != rows * tasks) return 0;
    if (length[START] != rows * tasks || length[END] != rows * tasks) return 0;
    return length[OVERLAP] == rows * (lanes / width) && length[EXPOSED] == rows * (lanes / width);
}

/* Run the tasks under one row of costs. What all rows need alike is in run. */
static void run_row(Run *run, const Py_buffer *views, Py_ssize_t lanes, Py_ssize_t tasks, Py_ssize_t row) {
    Py_ssize_t roles = lanes / run->width;
    const double **costs[] = {&run->seconds, &run->slow_compute, &run->slow_communication};
    for (int i = 0; i < 3; i++) {
        const Py_buffer *view = &views[SECONDS + i];
        /* Costs of one row are those of all rows. */
        int one = view->len / view->itemsize == tasks;
        *costs[i] = (const double *)view->buf + (one ? 0 : row * tasks);
    }
    run->start = (double *)views[START].buf + row * tasks;
    run->end = (double *)views[END].buf + row * tasks;
    memcpy(run->waits_for, views[WAITS_FOR].buf, sizeof(int32_t) * (size_t)tasks);
    memset(run->beside, 0, sizeof(Beside) * (size_t)roles);
    run->now = 0;
    run->active = 0;
    run->ended = -1;
    start_all(run, views[LANE_START].buf, (int32_t)lanes);
    while (run->active) finish_first(run);
    for (Py_ssize_t role = 0; role < roles; role++) {
        ((double *)views[OVERLAP].buf)[row * roles + role] = run->beside[role].overlap;
        ((double *)views[EXPOSED].buf)[row * roles + role] = run->beside[role].exposed;
    }
}

static PyObject *simulate_arrays(Py_buffer *views, int rows, int width, int compute, int communication, int blocking) {
    Py_ssize_t length[ARRAYS], lanes, tasks;
    Run run = {0};
    PyObject *result = NULL;
    for (int i = 0; i < ARRAYS; i++) length[i] = views[i].len / views[i].itemsize;
    lanes = length[LANE_START] - 1;
    tasks = length[QUEUE];
    if (!lengths_agree(length, lanes, tasks, width, rows)
        || !is_valid(views[LANE_START].buf, lanes, views[QUEUE].buf, tasks, tasks)
        || !is_valid(views[FOLLOWER_START].buf, tasks, views[FOLLOWERS].buf, length[FOLLOWERS], tasks)) {
        PyErr_SetString(PyExc_ValueError, "the arrays of the graph do not fit together");
        return NULL;
    }
    run.waits_for = malloc(sizeof(int32_t) * (size_t)(tasks + 1));
    run.lane_of = calloc((size_t)tasks + 1, sizeof(int32_t));
    run.heap = malloc(sizeof(Entry) * (size_t)(lanes + 1));
    run.lanes = calloc((size_t)lanes + 1, sizeof(Lane));
    run.beside = calloc((size_t)(lanes / width) + 1, sizeof(Beside));
    if (run.waits_for && run.lane_of && run.heap && run.lanes && run.beside) {
        run.queue = views[QUEUE].buf;
        run.follower_start = views[FOLLOWER_START].buf;
        run.followers = views[FOLLOWERS].buf;
        run.width = width;
        run.compute = compute;
        run.communication = communication;
        run.blocking = blocking;
        // Nothing here touches an object: runs under other costs go on beside this one in threads of their own.
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t row = 0; row < rows; row++) run_row(&run, views, lanes, tasks, row);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSsize_t(run.finished);
    } else {
        PyErr_NoMemory();
    }
    free(run.waits_for);
    free(run.lane_of);
    free(run.heap);
    free(run.lanes);
    free(run.beside);
    return result;
}

static PyObject *run_events(PyObject *module, PyObject *arguments) {
    PyObject *objects[ARRAYS], *result;
    Py_buffer views[ARRAYS];
    int rows, width, compute, communication, blocking;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOOiiiii:run_events", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5], &objects[6], &objects[7], &objects[8], &objects[9], &objects[10],
                          &objects[11], &rows, &width, &compute, &communication, &blocking))
        return NULL;
    if (rows < 1) {
        PyErr_SetString(PyExc_ValueError, "there is no row of costs");
        return NULL;
    }
    if (width < 1 || compute < 0 || compute >= width || communication < 0 || communication >= width
        || blocking < 0 || blocking >= width || compute == communication || blocking == compute
        || blocking == communication) {
        PyErr_SetString(PyExc_ValueError, "a role has no three such lanes");
        return NULL;
    }
    if (!open_arrays(objects, views)) return NULL;
    result = simulate_arrays(views, rows, width, compute, communication, blocking);
    for (int i = 0; i < ARRAYS; i++) PyBuffer_Release(&views[i]);
    return result;
}

static PyMethodDef methods[] = {
    {"run_events", run_events, METH_VARARGS,
     "Run a graph's tasks; returns how many ended, which is fewer than all where they wait for each other in a circle."},
    {NULL, NULL, 0, NULL},
};

static int add_interface(PyObject *module) { return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_interface}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "engine_compiled", "The simulator's event loop, compiled.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_engine_compiled(void) { return PyModuleDef_Init(&definition); }
