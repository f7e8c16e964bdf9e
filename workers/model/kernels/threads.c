// Where the threads run.

#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>
#include <stdint.h>

// Binds thread i of the calling thread's OpenMP team to core cores[i].
void bind_threads(const int64_t *cores, int64_t count) {
#pragma omp parallel num_threads(count)
    {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cores[omp_get_thread_num()], &set);
        sched_setaffinity(0, sizeof set, &set);
    }
}
