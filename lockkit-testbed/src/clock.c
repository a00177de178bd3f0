/* The time of day, shifted by the microseconds in the file that LOCKKIT_TESTBED_CLOCK names. Every other clock is
 * passed on as it is. The real clock is read by system call: looking up the C library's function could need memory
 * while the program's allocator is still being set up.
 *
 * A thread that waits on a condition until a time of day waits by the shifted clock, too. The kernel knows nothing of
 * the shift, so it is taken off. When the clock is stepped meanwhile, a thread of this library has all of these look
 * again: their waits end as if somebody had signalled, and the next ones know the new time, which may be over. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
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

/* A wait until a time of day, on its thread's stack. */
struct wait {
    pthread_cond_t *condition;
    /* The shift that it reckons with. */
    int64_t shift;
    struct wait *next, **self;
};

static struct wait *waits;
static pthread_mutex_t waits_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t watched = PTHREAD_ONCE_INIT;

/* Again and again: a thread that is listed may not be waiting yet. */
static void *watch_steps(void *nothing) {
    const struct timespec pause = {0, 2000000};
    for (;;) {
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&waits_mutex);
        for (struct wait *wait = waits; wait; wait = wait->next)
            if (wait->shift != *offset)
                pthread_cond_broadcast(wait->condition);
        pthread_mutex_unlock(&waits_mutex);
    }
    return nothing;
}

/* The program's signals are none of its business. */
static void start_watching(void) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, NULL, watch_steps, NULL) != 0)
        abort();
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void leave(void *left) {
    struct wait *wait = left;
    pthread_mutex_lock(&waits_mutex);
    *wait->self = wait->next;
    if (wait->next)
        wait->next->self = wait->self;
    pthread_mutex_unlock(&waits_mutex);
}

typedef int timed_wait(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
typedef int clock_wait(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);

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

static clock_wait *next_clock_wait(void) {
    static clock_wait *volatile next;
    if (!next)
        next = (clock_wait *)dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    return next;
}

/* Waits until a time of day, on the condition's own clock, or on the one that is named. */
static int wait_by_shifted_clock(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until,
                                 int is_named) {
    struct wait wait = {condition, *offset, NULL, &waits};
    int64_t nanos = (int64_t)until->tv_sec * 1000000000 + until->tv_nsec - wait.shift * 1000;
    struct timespec real = {nanos / 1000000000, nanos % 1000000000};
    int result;
    pthread_once(&watched, start_watching);
    pthread_mutex_lock(&waits_mutex);
    wait.next = waits;
    if (waits)
        waits->self = &wait.next;
    waits = &wait;
    pthread_mutex_unlock(&waits_mutex);
    pthread_cleanup_push(leave, &wait);
    if (is_named)
        result = next_clock_wait()(condition, mutex, CLOCK_REALTIME, &real);
    else
        result = next_timed_wait()(condition, mutex, &real);
    pthread_cleanup_pop(1);
    return result;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    /* Those by the monotonic clock begin with the machine. */
    if (offset && until->tv_sec > 1000000000)
        return wait_by_shifted_clock(condition, mutex, until, 0);
    return next_timed_wait()(condition, mutex, until);
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
    if (offset && clock == CLOCK_REALTIME)
        return wait_by_shifted_clock(condition, mutex, until, 1);
    return next_clock_wait()(condition, mutex, clock, until);
}
