/* A clock of the day that is off by what ~/.clock says, in seconds; that of waits is the true one.

   cc -shared -fPIC -O1 -o clock.so clock.c -ldl; LD_PRELOAD=clock.so: for recovery.py --clocks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static int truly(clockid_t id, struct timespec *t) { return syscall(SYS_clock_gettime, id, t); }

static long offset(void) {
    static long known, looked;
    static char path[4096];
    struct timespec now;
    truly(CLOCK_MONOTONIC, &now);
    long ticks = now.tv_sec * 10 + now.tv_nsec / 100000000;
    if (ticks != looked) {
        char text[32];
        if (!*path) snprintf(path, sizeof path, "%s/.clock", getenv("HOME") ? getenv("HOME") : "");
        int file = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t size = file < 0 ? 0 : read(file, text, sizeof text - 1);
        if (file >= 0) close(file);
        text[size > 0 ? size : 0] = 0;
        known = atol(text);
        looked = ticks;
    }
    return known;
}

int clock_gettime(clockid_t id, struct timespec *t) {
    int failed = truly(id, t);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

/* What waits until a time of day waits as long as it would with that clock. */
int sem_timedwait(sem_t *restrict s, const struct timespec *restrict until) {
    struct timespec real = {until->tv_sec - offset(), until->tv_nsec};
    return NEXT(sem_timedwait)(s, &real);
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m,
                           const struct timespec *restrict until) {
    static typeof(&pthread_cond_timedwait) next;
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next) next = NEXT(pthread_cond_timedwait);
    struct timespec now, real = {until->tv_sec - offset(), until->tv_nsec};
    clock_gettime(CLOCK_REALTIME, &now);
    long apart = until->tv_sec - now.tv_sec; /* far away: the condition is one of a steady clock */
    return next(c, m, apart < -86400L * 3650 ? until : &real);
}
