/*
 * A stand-in for libcudart over driver.c: what torch_memory_saver's binary imports from it, and the cudaMalloc and
 * cudaFree that its preload hook stands in front of.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int result;
typedef uint64_t u64;

enum { HOST_TO_DEVICE = 1 };

result cuGetErrorString(result, const char **);
result cuMemAddressFree(u64, size_t);
result cuMemAddressReserve(u64 *, size_t, size_t, u64, u64);
result cuMemCreate(u64 *, size_t, const void *, u64);
result cuMemGetAllocationGranularity(size_t *, const void *, int);
result cuMemMap(u64, size_t, size_t, u64, u64);
result cuMemRelease(u64);
result cuMemSetAccess(u64, size_t, const void *, size_t);
result cuMemUnmap(u64, size_t);
result fake_cuda_memory(size_t *, size_t *);
result fake_cuda_host_taken(size_t);
void fake_cuda_host_given(size_t);
int fake_cuda_take_damage(void);

/* In front of every block: its size, and room to keep the block aligned. */
enum { HEADER = 64 };

result cudaMallocHost(void **block, size_t size)
{
    result status = fake_cuda_host_taken(size);
    if (status)
        return status;
    char *start = aligned_alloc(HEADER, (size + 2 * HEADER - 1) / HEADER * HEADER);
    if (!start) {
        fake_cuda_host_given(size);
        return 2;
    }
    memcpy(start, &size, sizeof size);
    *block = start + HEADER;
    return 0;
}

result cudaFreeHost(void *block)
{
    size_t size;
    char *start = (char *)block - HEADER;
    memcpy(&size, start, sizeof size);
    fake_cuda_host_given(size);
    free(start);
    return 0;
}

result cudaMemcpy(void *target, const void *source, size_t size, int kind)
{
    memcpy(target, source, size);
    if (kind == HOST_TO_DEVICE && size && fake_cuda_take_damage())
        ((unsigned char *)target)[size / 2] ^= 1;
    return 0;
}

result cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    return fake_cuda_memory(free_bytes, total_bytes);
}

/* Plain device memory, outside the saver. Blocks are few, so a list does. */
static struct block {
    u64 address, handle;
    size_t size;
    struct block *next;
} *blocks;

result cudaMalloc(void **pointer, size_t size)
{
    size_t unit;
    struct block block = {0};
    cuMemGetAllocationGranularity(&unit, NULL, 0);
    block.size = (size + unit - 1) / unit * unit;
    result status = cuMemCreate(&block.handle, block.size, NULL, 0);
    if (status)
        return status;
    struct block *entry = malloc(sizeof *entry);
    cuMemAddressReserve(&block.address, block.size, 0, 0, 0);
    cuMemMap(block.address, block.size, 0, block.handle, 0);
    cuMemSetAccess(block.address, block.size, NULL, 1);
    block.next = blocks;
    *entry = block;
    blocks = entry;
    *pointer = (void *)block.address;
    return 0;
}

result cudaFree(void *pointer)
{
    for (struct block **place = &blocks; *place; place = &(*place)->next) {
        struct block *entry = *place;
        if (entry->address == (u64)pointer) {
            cuMemUnmap(entry->address, entry->size);
            cuMemRelease(entry->handle);
            cuMemAddressFree(entry->address, entry->size);
            *place = entry->next;
            free(entry);
            return 0;
        }
    }
    return pointer ? 1 : 0;
}

result cudaGetDevice(int *device)
{
    *device = 0;
    return 0;
}

result cudaSetDevice(int device) { return device ? 1 : 0; }
result cudaDeviceSynchronize(void) { return 0; }

const char *cudaGetErrorString(result error)
{
    const char *text;
    cuGetErrorString(error, &text);
    return text;
}
