// Runs recorded kernel calls in sequence on a team of threads that does not wait for preempted threads.
//
// Threads take chunks of the current call's items. When no chunk is left, a thread waits for the
// others for about the time of one chunk, then computes a missing chunk again: its owner may be
// preempted for milliseconds, while a chunk takes microseconds (like the backup tasks of MapReduce,
// OSDI 2004). An item always writes the same bytes, so the late owner does no harm as long as the
// memory is not used for something else. Therefore:
// - a call waits for threads that are late in an earlier call whose memory it reuses (`distance`);
// - a run ends when no thread is in a call that reads or writes memory of others (`shared`);
// - the memory of a program must stay valid until `wait_for_helpers` has returned.
//
// There is no leader: any thread may begin the next call, so the caller may be preempted as well.

#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

enum { MAX_THREADS = 1024, MAX_UNITS = 4096, MAX_ARGS = 17, RUNS = 8 };  // threads: as num_threads in config.py
// Nanoseconds before a chunk is computed again; polls before pauses; polls before sleep.
enum { SHORT_WAIT = 3000, EAGER_LOOKS = 1000, SPINS = 4000 };

typedef struct {
    Kernel *kernel;
    int64_t rows;      // when the call was recorded
    int64_t shared;    // whether it uses memory of others
    int64_t distance;  // minimum number of calls since the memory it writes was last used; 0: never used
    Arg args[MAX_ARGS];
} Call;

typedef struct {
    const Call *calls;
    int64_t num_calls, rows, recorded_rows, threads;
    uint64_t first;                                  // serial of the first call
    _Alignas(64) _Atomic uint64_t turn;              // serial of the current call << 16 | its next unit
    _Alignas(64) _Atomic int64_t helpers;            // in this run
    _Alignas(64) _Atomic uint64_t done[MAX_UNITS];   // serial of the call in which the chunk that begins here was done
} Run;

typedef struct {
    _Alignas(64) _Atomic uint64_t serial;  // of the call that the thread is in; 0: in no call
} Thread;

static struct {
    pthread_mutex_t lock;
    pthread_t helpers[MAX_THREADS];
    Thread threads[MAX_THREADS];  // the caller, then the helpers
    int64_t num_helpers;
    uint64_t num_calls;  // of all runs
    pid_t process;
    int niceness;
    int64_t num_cores, cores[MAX_THREADS];  // cores for caller and helpers, if the numbers match
    _Atomic int ending;
    _Atomic uint32_t started;  // number of runs; helpers wait on it for the next run
    _Atomic int sleeping;
    Run runs[RUNS];  // used in turn, so that late helpers still find their run
} team = {.lock = PTHREAD_MUTEX_INITIALIZER};

// Pauses between two polls. The first polls follow each other without a pause: most waits end within
// a microsecond, and on virtual machines one pause may take half a microsecond.
static inline void relax(int looks) {
    if (looks < EAGER_LOOKS) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

// The work of a call. Items are grouped into units, so that there are at most MAX_UNITS.
typedef struct {
    const Call *call;
    uint64_t serial;
    int64_t rows, items, size, units;
} Work;

// Returns the end of the chunk that begins at a unit. The first chunks are large, so that there are
// few; the last are small, so that threads end together (guided self-scheduling, Polychronopoulos
// and Kuck 1987).
static inline int64_t chunk_end(const Run *run, const Work *work, int64_t unit) {
    const int64_t share = (work->units - unit) / (2 * run->threads);
    return unit + (share > 1 ? share : 1);
}

static void compute(Run *run, const Work *work, int64_t unit) {
    const int64_t end = least(work->items, chunk_end(run, work, unit) * work->size);
    for (int64_t item = unit * work->size; item < end; item++) work->call->kernel(work->call->args, work->rows, item);
    atomic_store_explicit(&run->done[unit], work->serial, memory_order_release);
}

static inline int is_over(Run *run, uint64_t serial) { return atomic_load(&run->turn) >> 16 != serial; }

// Waits until every chunk is done or the call is over; computes chunks that take too long again.
static void wait_for_others(Run *run, const Work *work, int64_t patience) {
    for (int64_t unit = 0; unit < work->units; unit = chunk_end(run, work, unit)) {
        int64_t since = 0;
        for (int looks = 1; atomic_load_explicit(&run->done[unit], memory_order_acquire) != work->serial; looks++) {
            if (is_over(run, work->serial)) return;
            if (looks % 64) {
                relax(looks);
                continue;
            }
            const int64_t now = nanoseconds();
            since = since ? since : now;
            if (now - since > patience) compute(run, work, unit);
        }
    }
}

// Waits until no thread is late in a call whose memory this call writes, or this call is over.
static void wait_for_memory(Run *run, const Call *call, uint64_t serial) {
    for (int64_t i = 0; i <= team.num_helpers; i++) {
        uint64_t late;
        for (int looks = 1; (late = atomic_load(&team.threads[i].serial)) && late + call->distance <= serial; looks++) {
            if (is_over(run, serial)) return;
            relax(looks);
            if (looks % 1024 == 0) sched_yield();
        }
    }
}

// Works on a run until its last call is over. A thread publishes its call before it checks that the
// call is still the current one. So a thread that begins a later call, or ends the run, sees it.
static void take_part(Run *run, Thread *self) {
    for (uint64_t turn = atomic_load(&run->turn);; turn = atomic_load(&run->turn)) {
        const uint64_t serial = turn >> 16;
        const int64_t index = serial - run->first;
        if (index >= run->num_calls) break;
        atomic_store(&self->serial, serial);
        if (is_over(run, serial)) continue;
        const Call *call = run->calls + index;
        if (call->distance) wait_for_memory(run, call, serial);
        Work work = {.call = call, .serial = serial, .rows = call->rows * run->rows / run->recorded_rows};
        work.items = call->kernel(call->args, work.rows, -1);
        work.size = ceil_div(work.items, MAX_UNITS), work.units = work.items ? ceil_div(work.items, work.size) : 0;
        int64_t begun = 0, mine = 0;
        turn = atomic_load(&run->turn);
        while (turn >> 16 == serial && (int64_t)(turn & 0xFFFF) < work.units) {
            const int64_t unit = turn & 0xFFFF, end = chunk_end(run, &work, unit);
            if (!begun && work.units > 1) begun = nanoseconds();
            if (atomic_compare_exchange_strong(&run->turn, &turn, turn - unit + end)) {
                compute(run, &work, unit);
                mine += end - unit;
            }
            turn = atomic_load(&run->turn);
        }
        if (turn >> 16 != serial) continue;
        // Approximately the time of this thread's largest chunk.
        const int64_t usual = mine && begun ? (nanoseconds() - begun) / 2 : 0;
        wait_for_others(run, &work, usual > SHORT_WAIT ? usual : SHORT_WAIT);
        turn = serial << 16 | work.units;
        atomic_compare_exchange_strong(&run->turn, &turn, (serial + 1) << 16);
    }
    atomic_store(&self->serial, 0);
}

static void *help(void *self) {
    for (uint32_t seen = 0;;) {
        uint32_t now = atomic_load(&team.started);
        for (int looks = 0; now == seen && looks < SPINS; looks++) relax(looks), now = atomic_load(&team.started);
        if (now == seen) {
            atomic_fetch_add(&team.sleeping, 1);
            syscall(SYS_futex, &team.started, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            atomic_fetch_sub(&team.sleeping, 1);
            continue;
        }
        if (atomic_load(&team.ending)) return NULL;
        seen = now;
        Run *run = &team.runs[now % RUNS];
        atomic_fetch_add(&run->helpers, 1);
        if (atomic_load(&team.started) == now) take_part(run, self);
        atomic_fetch_sub(&run->helpers, 1);
    }
}

static void announce(void) {
    atomic_fetch_add(&team.started, 1);
    if (atomic_load(&team.sleeping)) syscall(SYS_futex, &team.started, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}

static void bind_thread(pthread_t thread, int64_t core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

// Creates the helpers; again if their number or the caller's niceness, which they inherit, changes.
static void gather_helpers(int64_t helpers) {
    const pid_t process = getpid();
    const int niceness = getpriority(PRIO_PROCESS, 0);
    if (team.process == process && team.niceness == niceness && team.num_helpers == helpers) return;
    if (team.process == process && team.num_helpers) {
        atomic_store(&team.ending, 1);
        announce();
        for (int64_t i = 0; i < team.num_helpers; i++) pthread_join(team.helpers[i], NULL);
        atomic_store(&team.ending, 0);
    }
    if (team.process != process) {  // helpers do not survive a fork
        memset(team.runs, 0, sizeof team.runs);
        memset(team.threads, 0, sizeof team.threads);
        atomic_store(&team.sleeping, 0);
    }
    team.process = process, team.niceness = niceness, team.num_helpers = 0;
    atomic_store(&team.started, 0);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // only the interpreter's threads handle signals
    for (int64_t i = 0; i < helpers; i++) {
        if (pthread_create(&team.helpers[i], NULL, help, &team.threads[i + 1])) break;
        if (team.num_cores == helpers + 1) bind_thread(team.helpers[i], team.cores[i + 1]);
        team.num_helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Binds the caller to the first of these cores, and the helpers of its runs to the others. Leaves all
// free if a team cannot have a thread for each.
void bind_threads(const int64_t *cores, int64_t count) {
    if (count > MAX_THREADS) return;
    pthread_mutex_lock(&team.lock);
    gather_helpers(0);
    memcpy(team.cores, cores, count * sizeof *cores);
    team.num_cores = count;
    bind_thread(pthread_self(), cores[0]);
    pthread_mutex_unlock(&team.lock);
}

// Returns whether the end of the run must wait for a thread in call `serial`.
static int is_waited_for(const Run *run, uint64_t serial, int leave) {
    return serial >= run->first && !(leave && !run->calls[serial - run->first].shared);
}

// Runs calls for `rows` rows, which were recorded for `recorded_rows`, on `threads` threads including
// the caller. `leave` means that the calls stay in memory, so late threads may remain in them.
static void run_calls(const Call *calls, int64_t num_calls, int64_t rows, int64_t recorded_rows, int64_t threads,
                      int leave) {
    pthread_mutex_lock(&team.lock);
    gather_helpers(least(threads, MAX_THREADS) - 1);
    Run *run = &team.runs[(atomic_load(&team.started) + 1) % RUNS];
    while (atomic_load(&run->helpers)) sched_yield();
    run->calls = calls, run->num_calls = num_calls;
    run->rows = rows, run->recorded_rows = recorded_rows, run->threads = threads;
    run->first = team.num_calls + 1;  // no chunk was ever done in call 0
    team.num_calls += num_calls;
    atomic_store(&run->turn, run->first << 16);
    announce();
    take_part(run, &team.threads[0]);
    for (int64_t i = 1; i <= team.num_helpers; i++)
        while (is_waited_for(run, atomic_load(&team.threads[i].serial), leave)) sched_yield();
    pthread_mutex_unlock(&team.lock);
}

// Runs recorded calls for `rows` rows. They must stay in memory until `wait_for_helpers` has returned.
void run_program(const Call *calls, int64_t num_calls, int64_t rows, int64_t recorded_rows, int64_t threads) {
    run_calls(calls, num_calls, rows, recorded_rows, threads, 1);
}

// Runs one call, and waits for all threads in it.
void run_call(const Call *call, int64_t threads) {
    if (!call->rows) return;  // for example the logits of a step that samples nothing
    const int64_t items = call->kernel(call->args, call->rows, -1);
    if (items > 1 && threads > 1)
        run_calls(call, 1, call->rows, call->rows, threads, 0);
    else
        for (int64_t item = 0; item < items; item++) call->kernel(call->args, call->rows, item);
}

// Waits until no helper is in a run any more. Then a program's memory may be freed.
void wait_for_helpers(void) {
    pthread_mutex_lock(&team.lock);
    for (int i = 0; i < RUNS; i++)
        while (team.process == getpid() && atomic_load(&team.runs[i].helpers)) sched_yield();
    pthread_mutex_unlock(&team.lock);
}
