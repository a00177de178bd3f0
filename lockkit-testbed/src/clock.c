/* The time of day, shifted by the microseconds in the file that LOCKKIT_TESTBED_CLOCK names. Every other clock is
 * passed on as it is. The real clock is read by system call: looking up the C library's function could need memory
 * while the program's allocator is still being set up. A thread that waits until a time of day comes later, and the
 * kernel knows nothing of the shift: it is taken off. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("LOCKKIT_TESTBED_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        offset = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (syscall(SYS_clock_gettime, clock, now) != 0)
        return -1;
    if (offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t nanos = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + *offset * 1000;
        now->tv_sec = nanos / 1000000000;
        now->tv_nsec = nanos % 1000000000;
    }
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0)
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0)
        return -1;
    if (now)
        *now = precise.tv_sec;
    return precise.tv_sec;
}

typedef int timed_wait(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

static timed_wait *next_timed_wait(void) {
    static timed_wait *volatile next;
    if (!next) {
        void *found = NULL;
#ifdef __GLIBC__
        /* Without a version it may be that of an older kind of condition. */
        found = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
#endif
        next = (timed_wait *)(found ? found : dlsym(RTLD_NEXT, "pthread_cond_timedwait"));
    }
    return next;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec real = *until;
    /* Those by the monotonic clock begin with the machine. */
    if (offset && real.tv_sec > 1000000000) {
        int64_t nanos = (int64_t)real.tv_sec * 1000000000 + real.tv_nsec - *offset * 1000;
        real.tv_sec = nanos / 1000000000;
        real.tv_nsec = nanos % 1000000000;
    }
    return next_timed_wait()(condition, mutex, &real);
}
