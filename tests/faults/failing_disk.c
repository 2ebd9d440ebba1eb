/* Loaded before the C library (LD_PRELOAD): from a call on, writing to files whose path holds a word fails.
   disk_fails("metrics.jsonl", ENOSPC, 3): the first three calls that match go through, and none after them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char wanted[256];
static int error_number, num_left;

void disk_fails(const char *word, int number, int num_good) {
    snprintf(wanted, sizeof wanted, "%s", word);
    error_number = number;
    num_left = num_good;
}

/* The same for processes that others start: DISK_FAILS="28 3 metrics.jsonl". */
__attribute__((constructor)) static void told(void) {
    const char *text = getenv("DISK_FAILS");
    int number, num_good, at;
    if (text && sscanf(text, "%d %d %n", &number, &num_good, &at) == 2) disk_fails(text + at, number, num_good);
}

static int fails(const char *path) {
    if (!error_number || !path || !strstr(path, wanted)) return 0;
    if (__atomic_fetch_sub(&num_left, 1, __ATOMIC_SEQ_CST) > 0) return 0;
    errno = error_number;
    return 1;
}

static int no_space(void) { return error_number == ENOSPC || error_number == EDQUOT || error_number == EIO; }

static int fd_fails(int fd) {
    char link[64], path[4096];
    if (!error_number || !no_space()) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return fails(path);
}

static int open_fails(const char *path, int flags) {
    if (no_space()) return (flags & O_CREAT) && access(path, F_OK) != 0 && fails(path);
    return (flags & (O_WRONLY | O_RDWR)) && fails(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name)                                                    \
    int name(const char *path, int flags, ...) {                      \
        va_list more; va_start(more, flags);                          \
        mode_t mode = va_arg(more, mode_t); va_end(more);             \
        return open_fails(path, flags) ? -1 : REAL(name)(path, flags, mode); \
    }
#define OPENAT(name)                                                  \
    int name(int at, const char *path, int flags, ...) {              \
        va_list more; va_start(more, flags);                          \
        mode_t mode = va_arg(more, mode_t); va_end(more);             \
        return open_fails(path, flags) ? -1 : REAL(name)(at, path, flags, mode); \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size) { return fd_fails(fd) ? -1 : REAL(write)(fd, data, size); }
ssize_t writev(int fd, const struct iovec *v, int n) { return fd_fails(fd) ? -1 : REAL(writev)(fd, v, n); }
ssize_t pwrite(int fd, const void *d, size_t n, off_t at) { return fd_fails(fd) ? -1 : REAL(pwrite)(fd, d, n, at); }
ssize_t pwrite64(int fd, const void *d, size_t n, off64_t at) { return fd_fails(fd) ? -1 : REAL(pwrite64)(fd, d, n, at); }
ssize_t copy_file_range(int in, off64_t *a, int out, off64_t *b, size_t n, unsigned int flags) {
    return fd_fails(out) ? -1 : REAL(copy_file_range)(in, a, out, b, n, flags);
}
int posix_fallocate(int fd, off_t at, off_t n) { return fd_fails(fd) ? errno : REAL(posix_fallocate)(fd, at, n); }
int mkdir(const char *path, mode_t mode) { return fails(path) ? -1 : REAL(mkdir)(path, mode); }
int rename(const char *from, const char *to) { return !no_space() && fails(to) ? -1 : REAL(rename)(from, to); }
int link(const char *from, const char *to) { return fails(to) ? -1 : REAL(link)(from, to); }
