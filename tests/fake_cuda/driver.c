/*
 * A stand-in for libcuda: virtual memory management over ordinary memory.
 *
 * "Physical" memory is one memfd per process, used from the front; an allocation is a piece of it that is never
 * reused, and releasing one punches a hole there, which really gives the pages back. A reserved address range is an
 * anonymous mapping without access rights; mapping an allocation replaces it by the file's pages, unmapping puts the
 * inaccessible mapping back. So memory that is paused faults when it is touched.
 *
 * Fresh memory is filled with 0xFF, which is NaN in every floating-point format: a GPU does not give zeros either,
 * and content that was wrongly believed to survive shows at once.
 *
 * Stricter than need be: unknown handles, double mappings and ranges that do not match are errors. Failures that a
 * test asks for (fake_cuda_*) happen once, or from then on, as said below.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int result;
typedef uint64_t u64;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3 };

/* Real devices have 2 MiB; less keeps tests with many small tensors small. */
static const u64 GRANULARITY = 64 * 1024;

struct allocation {
    u64 offset, size;
    int mapped;
    int released;
};
struct mapping {
    u64 address, size, handle;
    struct mapping *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations; /* by handle; handle 0 is none */
static u64 handles, capacity;
static struct mapping *mappings;
static int memory = -1;
static pid_t owner; /* the process that used the driver first */
static u64 file_end, used, total, host_bytes, host_calls;

static u64 host_calls_until_failure; /* 0: none fails */
static int damage_next_upload;

/* As with CUDA, a child forked after the first use has no device. Call with the lock held. */
static result ready(void)
{
    if (owner && owner != getpid())
        return NOT_INITIALIZED;
    if (memory >= 0)
        return SUCCESS;
    owner = getpid();
    if (!total) {
        const char *given = getenv("FAKE_CUDA_TOTAL_BYTES");
        total = given ? strtoull(given, NULL, 10) : 1ull << 30;
    }
    memory = memfd_create("fake_cuda", MFD_CLOEXEC);
    return memory < 0 ? OUT_OF_MEMORY : SUCCESS;
}

static struct allocation *find(u64 handle)
{
    return handle && handle <= handles && !(allocations[handle].released && !allocations[handle].mapped)
               ? &allocations[handle]
               : NULL;
}

/* A handle lives until it is released and nowhere mapped. */
static void drop_if_unused(struct allocation *piece)
{
    if (piece->released && !piece->mapped) {
        fallocate(memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, piece->offset, piece->size);
        used -= piece->size;
    }
}

result cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal ? INVALID_VALUE : SUCCESS;
}

result cuCtxGetDevice(int *device)
{
    *device = 0;
    return SUCCESS;
}

result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)attribute, (void)device;
    *value = 0;
    return SUCCESS;
}

result cuGetErrorString(result error, const char **text)
{
    static const char *const texts[] = {"no error", "invalid argument", "out of memory", "initialization error"};
    *text = error >= 0 && error <= NOT_INITIALIZED ? texts[error] : "unknown error";
    return SUCCESS;
}

result cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option)
{
    (void)properties, (void)option;
    *granularity = GRANULARITY;
    return SUCCESS;
}

result cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags)
{
    (void)alignment, (void)wanted, (void)flags;
    void *range = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED)
        return OUT_OF_MEMORY;
    *address = (u64)range;
    return SUCCESS;
}

result cuMemAddressFree(u64 address, size_t size)
{
    return munmap((void *)address, size) ? INVALID_VALUE : SUCCESS;
}

result cuMemCreate(u64 *handle, size_t size, const void *properties, u64 flags)
{
    (void)properties, (void)flags;
    pthread_mutex_lock(&lock);
    result status = ready();
    if (status == SUCCESS && size % GRANULARITY)
        status = INVALID_VALUE;
    if (status == SUCCESS && (used + size > total || ftruncate(memory, file_end + size)))
        status = OUT_OF_MEMORY;
    if (status == SUCCESS && handles + 1 >= capacity) {
        u64 more = capacity ? 2 * capacity : 1024;
        struct allocation *grown = realloc(allocations, more * sizeof *grown);
        if (grown)
            allocations = grown, capacity = more;
        else
            status = OUT_OF_MEMORY;
    }
    if (status == SUCCESS) {
        allocations[++handles] = (struct allocation){.offset = file_end, .size = size};
        file_end += size;
        used += size;
        *handle = handles;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

result cuMemRelease(u64 handle)
{
    pthread_mutex_lock(&lock);
    result status = ready();
    struct allocation *piece = find(handle);
    if (status == SUCCESS && (!piece || piece->released))
        status = INVALID_VALUE;
    if (status == SUCCESS) {
        piece->released = 1;
        drop_if_unused(piece);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

result cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags)
{
    (void)flags;
    pthread_mutex_lock(&lock);
    result status = ready();
    struct allocation *piece = find(handle);
    if (status == SUCCESS && (!piece || piece->released || offset || size != piece->size))
        status = INVALID_VALUE;
    for (struct mapping *other = mappings; status == SUCCESS && other; other = other->next)
        if (address < other->address + other->size && other->address < address + size)
            status = INVALID_VALUE;
    struct mapping *entry = status == SUCCESS ? malloc(sizeof *entry) : NULL;
    if (status == SUCCESS && !entry)
        status = OUT_OF_MEMORY;
    if (status == SUCCESS
        && mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory, piece->offset) == MAP_FAILED)
        status = INVALID_VALUE;
    if (status == SUCCESS) {
        *entry = (struct mapping){address, size, handle, mappings};
        mappings = entry;
        piece->mapped++;
    } else {
        free(entry);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

result cuMemSetAccess(u64 address, size_t size, const void *description, size_t count)
{
    (void)description, (void)count;
    if (mprotect((void *)address, size, PROT_READ | PROT_WRITE))
        return INVALID_VALUE;
    memset((void *)address, 0xFF, size);
    return SUCCESS;
}

result cuMemUnmap(u64 address, size_t size)
{
    pthread_mutex_lock(&lock);
    result status = ready();
    struct mapping **place = &mappings;
    while (*place && (*place)->address != address)
        place = &(*place)->next;
    struct mapping *entry = *place;
    if (status == SUCCESS && (!entry || entry->size != size))
        status = INVALID_VALUE;
    if (status == SUCCESS
        && mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
               == MAP_FAILED)
        status = INVALID_VALUE;
    if (status == SUCCESS) {
        struct allocation *piece = &allocations[entry->handle];
        piece->mapped--;
        drop_if_unused(piece);
        *place = entry->next;
        free(entry);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* For runtime.c, which has no state of its own. */

result fake_cuda_memory(size_t *free_bytes, size_t *total_bytes)
{
    pthread_mutex_lock(&lock);
    result status = ready();
    *total_bytes = total;
    *free_bytes = total > used ? total - used : 0;
    pthread_mutex_unlock(&lock);
    return status;
}

/* Count a host allocation, or refuse it. */
result fake_cuda_host_taken(size_t size)
{
    pthread_mutex_lock(&lock);
    result status = ready();
    if (status == SUCCESS && host_calls_until_failure && !--host_calls_until_failure)
        status = OUT_OF_MEMORY;
    if (status == SUCCESS) {
        host_bytes += size;
        host_calls++;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void fake_cuda_host_given(size_t size)
{
    pthread_mutex_lock(&lock);
    host_bytes -= size;
    pthread_mutex_unlock(&lock);
}

int fake_cuda_take_damage(void)
{
    return __atomic_exchange_n(&damage_next_upload, 0, __ATOMIC_SEQ_CST);
}

/* For tests. */

u64 fake_cuda_used(void) { return used; }
u64 fake_cuda_pinned(void) { return host_bytes; }
u64 fake_cuda_host_calls(void) { return host_calls; }
u64 fake_cuda_granularity(void) { return GRANULARITY; }
/* How much device memory there is from now on; less than is used leaves none free. */
void fake_cuda_set_total(u64 bytes) { total = bytes; }
/* The n-th host allocation from now on fails, once. */
void fake_cuda_fail_host(u64 n) { host_calls_until_failure = n; }
/* The next copy from host to device changes one bit on the way, once. */
void fake_cuda_damage_upload(void) { damage_next_upload = 1; }
