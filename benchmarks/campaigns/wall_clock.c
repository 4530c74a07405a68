/* Shifts the wall clock of the process that preloads it, and of nothing that it starts: `deployments.Clock`.

   EYRIE_CLOCK_FILE holds one long, seconds, which may change at any time. The monotonic clock goes on, as when a
   machine's clock is set. libfaketime 0.9.10 is not used: its clock_nanosleep fails with EINVAL for Python's time.sleep
   where the monotonic clock is not shifted too. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *shift_s;

__attribute__((constructor)) static void read_environment(void) {
    const char *path = getenv("EYRIE_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *page = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        shift_s = page == MAP_FAILED ? NULL : page;
        close(file);
    }
    unsetenv("LD_PRELOAD");
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = (int)syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && shift_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *shift_s;
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}
