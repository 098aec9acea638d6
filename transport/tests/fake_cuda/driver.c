// A CUDA driver made of host memory, for tests on machines without a GPU: the functions that pleach
// calls and no others, so that a call which would wait for the GPU (cuCtxSynchronize and the like)
// is a missing symbol.
//
// It is stricter than the real one. Addresses of "GPU" memory are not accessible to the host: a
// load or store by it is a fatal signal. Work put into a stream is done later, one piece at every
// FAKE_CUDA_LAG queries of an event, so who does not wait sees old bytes. An address that is no
// memory of the GPU, nor pinned, is an error that stays. Allocations are memfds, so what one
// process exports another one really shares. Kernels are those of reduce.cu, compiled by the C
// compiler, and only those whose names the PTX has.
//
// What it is comes from the environment: FAKE_CUDA_GPUS (1), FAKE_CUDA_BYTES (16 GiB a process and
// GPU: tests of one process run at the same time, and pages that nobody writes take no memory),
// FAKE_CUDA_LAG (2), FAKE_CUDA_VERSION (12000), FAKE_CUDA_INIT (the code of cuInit),
// FAKE_CUDA_DMA_BUF (1), FAKE_CUDA_ORDERING (0), FAKE_CUDA_FLUSH (1), FAKE_CUDA_SHARES (1),
// FAKE_CUDA_PEERMEM (0), FAKE_CUDA_UNMARKED_BYTES (0): no event can be recorded right behind a copy
// of so many bytes, FAKE_CUDA_P2P (1), FAKE_CUDA_HANGS (0: kernels end), FAKE_CUDA_FIRST (0: the
// number of the first GPU that this process sees among those of the machine). fakeCudaLaunches()
// says how many kernels were launched, fakeCudaCopies() how many copies were begun.
//
// With FAKE_CUDA_PEERMEM 1 the addresses of "GPU" memory are accessible, so that the kernel gives
// it to any device, as with nvidia-peermem. With 2 it gives devices a copy, and what they write
// there is in the memory only after a flush.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include KERNELS

typedef int Code;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    MISALIGNED_ADDRESS = 716, NOT_SUPPORTED = 801 };
enum { GPUS_MAX = 8, RANGES_MAX = 4096, UNIT_BYTES = 1 << 16 };

struct Allocation { int file; size_t bytes; int gpu; int holders; };
// Addresses: of a reservation, or of memory that was allocated whole.
// `seen`: what devices see at `base`, as of the last flush, where that is a copy.
struct Range {
    uint64_t base;
    size_t bytes;
    char *alias, *seen;
    struct Allocation *behind;
    int is_accessible;
    uint64_t number; // of what is mapped there, which no other mapping of this process ever has
    int is_whole;
};
struct Host { char *base; size_t bytes; };
struct Event { uint64_t recorded, reached; int holders; };
enum Kind { COPY, FILL, LAUNCH, RECORD, WAIT };
struct Work {
    struct Work *next;
    enum Kind kind;
    uint64_t into, from, bytes, version;
    struct Event *event;
    void (*kernel)(const struct Arguments *);
    size_t element_bytes;
    u64 workers;
    struct Arguments arguments;
};
struct Stream { struct Stream *next; struct Work *first, **last; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct Range ranges[RANGES_MAX];
static struct Host hosts[RANGES_MAX];
static struct Stream *streams, *legacy;
static size_t used[GPUS_MAX];
static int contexts[GPUS_MAX];
static uint64_t numbers;
static Code broken;
static long queries, launches, copies;
static int is_initialized;
static __thread void *current;

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static size_t gpu_bytes(void) { return (size_t)setting("FAKE_CUDA_BYTES", 16L << 30); }

static int gpu_of(void *context) { return (int)((int *)context - contexts); }

// The host's address of bytes that the GPU reaches, or NULL.
static char *reach(uint64_t address, uint64_t bytes) {
    for (int i = 0; i < RANGES_MAX; ++i) {
        struct Range *range = &ranges[i];
        if (range->bytes && range->behind && range->is_accessible && address >= range->base
            && address + bytes <= range->base + range->bytes)
            return range->alias + (address - range->base);
    }
    for (int i = 0; i < RANGES_MAX; ++i)
        if (hosts[i].bytes && address >= (uint64_t)hosts[i].base
            && address + bytes <= (uint64_t)hosts[i].base + hosts[i].bytes)
            return (char *)address;
    return NULL;
}

static int is_gpu_address(uint64_t address) {
    for (int i = 0; i < RANGES_MAX; ++i)
        if (ranges[i].bytes && address >= ranges[i].base && address < ranges[i].base + ranges[i].bytes) return 1;
    return 0;
}

// Devices see what the GPU wrote, where they have a copy.
static void wrote(uint64_t address, uint64_t bytes) {
    for (int i = 0; i < RANGES_MAX; ++i) {
        struct Range *range = &ranges[i];
        if (range->bytes && range->seen && address >= range->base && address < range->base + range->bytes) {
            uint64_t at = address - range->base;
            memcpy(range->seen + at, range->alias + at, bytes);
            memcpy((char *)address, range->alias + at, bytes);
        }
    }
}

// What devices have written to their copies since the last flush is written to the memory.
static void flush(void) {
    enum { PIECE_BYTES = 4096 };
    for (int i = 0; i < RANGES_MAX; ++i) {
        struct Range *range = &ranges[i];
        if (!range->bytes || !range->seen) continue;
        for (size_t piece = 0; piece < range->bytes; piece += PIECE_BYTES) {
            const char *now = (const char *)range->base + piece;
            if (!memcmp(range->seen + piece, now, PIECE_BYTES)) continue;
            for (size_t at = piece; at < piece + PIECE_BYTES; ++at) {
                char byte = ((volatile char *)range->base)[at];
                if (range->seen[at] != byte) range->alias[at] = range->seen[at] = byte;
            }
        }
    }
}

// Zeroed pages of an allocation go back to the kernel, and take no memory and no time until they
// are written: staging is 64 MB a rank and more, of which few tests use much.
static void fill(char *into, int byte, size_t bytes) {
    enum { PAGE_BYTES = 4096 };
    size_t head = -(uintptr_t)into % PAGE_BYTES;
    size_t pages = bytes > head ? (bytes - head) / PAGE_BYTES * PAGE_BYTES : 0;
    if (byte || !pages || madvise(into + head, pages, MADV_REMOVE)) head = bytes, pages = 0;
    memset(into, byte, head);
    memset(into + head + pages, byte, bytes - head - pages);
}

// Copies reach any memory of the host besides.
static char *reach_by_copy(uint64_t address, uint64_t bytes) {
    char *place = reach(address, bytes);
    return place || is_gpu_address(address) ? place : (char *)address;
}

static void launch(struct Work *work) {
    struct Arguments *arguments = &work->arguments, given = work->arguments;
    uint64_t bytes = arguments->elements * work->element_bytes, all = 0;
    if (arguments->from_count > SOURCES_MAX || arguments->into_count > DESTINATIONS_MAX) {
        broken = ILLEGAL_ADDRESS;
        return;
    }
    for (u32 i = 0; i < arguments->from_count + arguments->into_count; ++i) {
        u64 *place = i < arguments->from_count ? &arguments->from[i] : &arguments->into[i - arguments->from_count];
        all |= *place;
        *place = (u64)reach(*place, bytes);
        if (!*place) {
            broken = ILLEGAL_ADDRESS;
            return;
        }
    }
    if (arguments->is_aligned ? all % 16 : all % work->element_bytes) {
        broken = MISALIGNED_ADDRESS;
        return;
    }
    pleach_workers = work->workers;
    for (pleach_worker = 0; pleach_worker < pleach_workers; ++pleach_worker) work->kernel(arguments);
    for (u32 i = 0; i < given.into_count; ++i) wrote(given.into[i], bytes);
}

// The next piece of a stream; whether there was one that could be done.
static int advance(struct Stream *stream) {
    struct Work *work = stream->first;
    if (!work) return 0;
    if (broken == OK) switch (work->kind) {
        case WAIT:
            if (work->event->reached < work->version) return 0;
            break;
        case RECORD:
            break;
        case COPY: {
            char *from = reach_by_copy(work->from, work->bytes), *into = reach_by_copy(work->into, work->bytes);
            if (from && into) memmove(into, from, work->bytes), wrote(work->into, work->bytes);
            else broken = ILLEGAL_ADDRESS;
            break;
        }
        case FILL: {
            char *into = reach(work->into, work->bytes);
            if (into) fill(into, (int)work->from, work->bytes), wrote(work->into, work->bytes);
            else broken = ILLEGAL_ADDRESS;
            break;
        }
        case LAUNCH:
            if (setting("FAKE_CUDA_HANGS", 0)) return 0;
            launch(work);
        }
    if (work->kind == RECORD && work->event->reached < work->version) work->event->reached = work->version;
    if (work->event && --work->event->holders == 0) free(work->event);
    stream->first = work->next;
    if (!stream->first) stream->last = &stream->first;
    free(work);
    return 1;
}

// Time passes for the GPU when somebody asks it.
static void tick(void) {
    long lag = setting("FAKE_CUDA_LAG", 2);
    if (++queries % (lag > 0 ? lag : 1)) return;
    for (struct Stream *stream = streams; stream; stream = stream->next) advance(stream);
}

static struct Work *put(struct Stream *stream, enum Kind kind) {
    struct Work *work = calloc(1, sizeof *work);
    if (!stream) {
        if (!legacy) {
            legacy = calloc(1, sizeof *legacy);
            legacy->last = &legacy->first;
            legacy->next = streams;
            streams = legacy;
        }
        stream = legacy;
    }
    work->kind = kind;
    *stream->last = work;
    stream->last = &work->next;
    return work;
}

// Every function that works on a context begins so and ends with `leave`.
#define ENTER \
    pthread_mutex_lock(&lock); \
    if (broken) return leave(broken); \
    if (!current) return leave(INVALID_CONTEXT)
#define LOCK pthread_mutex_lock(&lock)

static Code leave(Code code) {
    pthread_mutex_unlock(&lock);
    return code;
}

Code cuInit(unsigned flags) {
    Code code = (Code)setting("FAKE_CUDA_INIT", flags);
    is_initialized = code == OK;
    return code;
}

Code cuDriverGetVersion(int *version) { *version = (int)setting("FAKE_CUDA_VERSION", 12000); return OK; }

Code cuGetErrorName(Code code, const char **text) {
    *text = code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_FAKE";
    return OK;
}

Code cuGetErrorString(Code code, const char **text) { (void)code; *text = "said by the fake driver"; return OK; }

Code cuDeviceGetCount(int *count) { *count = (int)setting("FAKE_CUDA_GPUS", 1); return is_initialized ? OK : NOT_INITIALIZED; }

Code cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < setting("FAKE_CUDA_GPUS", 1) ? OK : INVALID_DEVICE;
}

Code cuDeviceGetName(char *name, int len, int device) { snprintf(name, (size_t)len, "Fake GPU %d", device); return OK; }

Code cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 16: *value = 4; break; // multiprocessors
    case 102: *value = 1; break; // virtual memory
    case 110: *value = 1; break; // GPUDirect with virtual memory
    case 103: *value = (int)setting("FAKE_CUDA_SHARES", 1); break;
    case 117: *value = (int)setting("FAKE_CUDA_FLUSH", 1); break;
    case 118: *value = (int)setting("FAKE_CUDA_ORDERING", 0); break;
    case 124: *value = (int)setting("FAKE_CUDA_DMA_BUF", 1); break;
    default: return INVALID_VALUE;
    }
    return OK;
}

Code cuDeviceGetUuid_v2(char *id, int device) { snprintf(id, 16, "fake gpu %d", device + (int)setting("FAKE_CUDA_FIRST", 0)); return OK; }
Code cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = gpu_bytes(); return OK; }
Code cuDeviceCanAccessPeer(int *can, int device, int peer) { (void)device; (void)peer; *can = (int)setting("FAKE_CUDA_P2P", 1); return OK; }
Code cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts[device]; ++contexts[device]; return OK; }
Code cuDevicePrimaryCtxRelease_v2(int device) { --contexts[device]; return OK; }
Code cuCtxGetCurrent(void **context) { *context = current; return OK; }
Code cuCtxSetCurrent(void *context) { current = context; return OK; }

Code cuCtxSynchronize(void) {
    for (;;) {
        int is_busy = 0;
        ENTER;
        for (struct Stream *stream = streams; stream; stream = stream->next) {
            advance(stream);
            is_busy |= stream->first != NULL;
        }
        if (!is_busy) return leave(broken);
        leave(OK);
        usleep(100);
    }
}

struct Properties { int type, handle_types, location_type, gpu; void *unused; unsigned char compression, rdma; short usage; char reserved[4]; };

Code cuMemGetAllocationGranularity(size_t *bytes, const struct Properties *properties, int option) {
    (void)properties; (void)option;
    *bytes = UNIT_BYTES;
    return OK;
}

static struct Allocation *allocate(int file, size_t bytes, int gpu) {
    struct Allocation *allocation = malloc(sizeof *allocation);
    *allocation = (struct Allocation){file, bytes, gpu, 1};
    return allocation;
}

static void let_go(struct Allocation *allocation) {
    if (--allocation->holders == 0) {
        close(allocation->file);
        used[allocation->gpu] -= allocation->bytes;
        free(allocation);
    }
}

static Code create(struct Allocation **handle, size_t bytes, int gpu) {
    char name[32];
    if (used[gpu] + bytes > gpu_bytes()) return OUT_OF_MEMORY;
    snprintf(name, sizeof name, "fake-cuda-%d", gpu);
    int file = memfd_create(name, MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)bytes)) return OUT_OF_MEMORY;
    used[gpu] += bytes;
    *handle = allocate(file, bytes, gpu);
    return OK;
}

Code cuMemCreate(struct Allocation **handle, size_t bytes, const struct Properties *properties, unsigned long long flags) {
    (void)flags;
    LOCK;
    int gpu = properties->gpu;
    if (bytes == 0 || bytes % UNIT_BYTES || properties->type != 1 || properties->location_type != 1 || gpu >= GPUS_MAX)
        return leave(INVALID_VALUE);
    return leave(create(handle, bytes, gpu));
}

Code cuMemRelease(struct Allocation *handle) { LOCK; let_go(handle); return leave(OK); }

Code cuMemExportToShareableHandle(int *file, struct Allocation *handle, int kind, unsigned long long flags) {
    (void)flags;
    if (kind != 1) return INVALID_VALUE;
    // As the real one: whoever wants it closed in programs that are started says so.
    *file = fcntl(handle->file, F_DUPFD, 0);
    return *file < 0 ? OUT_OF_MEMORY : OK;
}

Code cuMemImportFromShareableHandle(struct Allocation **handle, void *name, int kind) {
    char link[64], target[64] = "";
    struct stat status;
    int gpu, file = (int)(intptr_t)name;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (kind != 1 || readlink(link, target, sizeof target - 1) < 0 || sscanf(target, "/memfd:fake-cuda-%d", &gpu) != 1
        || gpu < 0 || gpu >= GPUS_MAX || fstat(file, &status))
        return INVALID_VALUE;
    LOCK;
    *handle = allocate(fcntl(file, F_DUPFD_CLOEXEC, 0), (size_t)status.st_size, gpu);
    used[gpu] += (size_t)status.st_size;
    return leave(OK);
}

static struct Range *free_range(void) {
    for (int i = 0; i < RANGES_MAX; ++i)
        if (!ranges[i].bytes) return &ranges[i];
    return NULL;
}

static struct Range *range_at(uint64_t base, size_t bytes) {
    for (int i = 0; i < RANGES_MAX; ++i)
        if (ranges[i].bytes == bytes && ranges[i].base == base && bytes) return &ranges[i];
    return NULL;
}

static Code reserve(struct Range **reserved, size_t bytes) {
    struct Range *range = free_range();
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!range || base == MAP_FAILED) return OUT_OF_MEMORY;
    *range = (struct Range){.base = (uint64_t)base, .bytes = bytes};
    *reserved = range;
    return OK;
}

// Puts at the range's own addresses what devices that are given them see.
static Code show_to_devices(struct Range *range) {
    long kind = setting("FAKE_CUDA_PEERMEM", 0);
    if (!kind) return OK;
    int flags = MAP_FIXED | (kind == 1 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    int file = kind == 1 ? range->behind->file : -1;
    if (mmap((void *)range->base, range->bytes, PROT_READ | PROT_WRITE, flags, file, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    if (kind == 1) return OK;
    range->seen = malloc(range->bytes);
    wrote(range->base, range->bytes);
    return OK;
}

static Code map(struct Range *range, struct Allocation *handle) {
    void *alias = mmap(NULL, range->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, handle->file, 0);
    if (alias == MAP_FAILED) return OUT_OF_MEMORY;
    range->alias = alias;
    range->behind = handle;
    range->number = ++numbers;
    ++handle->holders;
    return show_to_devices(range);
}

static void unmap(struct Range *range) {
    munmap(range->alias, range->bytes);
    mmap((void *)range->base, range->bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    free(range->seen);
    range->seen = NULL;
    let_go(range->behind);
    range->behind = NULL;
    range->is_accessible = 0;
}

Code cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wish, unsigned long long flags) {
    (void)alignment; (void)wish; (void)flags;
    struct Range *range;
    LOCK;
    if (bytes == 0 || bytes % UNIT_BYTES) return leave(INVALID_VALUE);
    Code code = reserve(&range, bytes);
    if (code == OK) *address = range->base;
    return leave(code);
}

Code cuMemAddressFree(uint64_t base, size_t bytes) {
    LOCK;
    struct Range *range = range_at(base, bytes);
    if (!range || range->behind) return leave(INVALID_VALUE);
    munmap((void *)base, bytes);
    range->bytes = 0;
    return leave(OK);
}

Code cuMemMap(uint64_t base, size_t bytes, size_t offset, struct Allocation *handle, unsigned long long flags) {
    (void)flags;
    LOCK;
    struct Range *range = range_at(base, bytes);
    if (!range || range->behind || offset || bytes != handle->bytes) return leave(INVALID_VALUE);
    return leave(map(range, handle));
}

// Whether a stream holds work on these bytes: a GPU may be about it already.
static int is_worked_on(uint64_t base, size_t bytes) {
    for (struct Stream *stream = streams; stream; stream = stream->next)
        for (struct Work *work = stream->first; work; work = work->next) {
            int fills = work->kind == FILL || work->kind == COPY;
            if (fills && work->into < base + bytes && base < work->into + work->bytes) return 1;
            if (work->kind == COPY && work->from < base + bytes && base < work->from + work->bytes) return 1;
        }
    return 0;
}

Code cuMemUnmap(uint64_t base, size_t bytes) {
    LOCK;
    struct Range *range = range_at(base, bytes);
    if (!range || !range->behind) return leave(INVALID_VALUE);
    // A driver does not wait for the work, which finds no memory there.
    if (is_worked_on(base, bytes)) broken = ILLEGAL_ADDRESS;
    unmap(range);
    return leave(OK);
}

struct Access { int location_type, gpu, flags; };

Code cuMemSetAccess(uint64_t base, size_t bytes, const struct Access *access, size_t count) {
    LOCK;
    struct Range *range = range_at(base, bytes);
    if (!range || !range->behind || count != 1 || access->location_type != 1 || access->flags != 3)
        return leave(INVALID_VALUE);
    range->is_accessible = 1;
    return leave(OK);
}

Code cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    struct Range *range;
    struct Allocation *handle;
    ENTER;
    size_t whole = (bytes + UNIT_BYTES - 1) / UNIT_BYTES * UNIT_BYTES;
    Code code = create(&handle, whole, gpu_of(current));
    if (code == OK) code = reserve(&range, whole);
    if (code == OK) code = map(range, handle);
    if (code != OK) return leave(code);
    let_go(handle);
    range->is_accessible = 1;
    *address = range->base;
    range->is_whole = 1;
    return leave(OK);
}

Code cuMemFree_v2(uint64_t base) {
    ENTER;
    for (int i = 0; i < RANGES_MAX; ++i)
        if (ranges[i].bytes && ranges[i].base == base && ranges[i].is_whole) {
            unmap(&ranges[i]);
            munmap((void *)base, ranges[i].bytes);
            ranges[i].bytes = 0;
            return leave(OK);
        }
    return leave(INVALID_VALUE);
}

Code cuMemHostRegister_v2(char *base, size_t bytes, unsigned flags) {
    ENTER;
    if (flags != 3 || !bytes) return leave(INVALID_VALUE);
    for (int i = 0; i < RANGES_MAX; ++i)
        if (!hosts[i].bytes) {
            hosts[i] = (struct Host){base, bytes};
            return leave(OK);
        }
    return leave(OUT_OF_MEMORY);
}

Code cuMemHostUnregister(char *base) {
    ENTER;
    for (int i = 0; i < RANGES_MAX; ++i)
        if (hosts[i].bytes && hosts[i].base == base) {
            hosts[i].bytes = 0;
            return leave(OK);
        }
    return leave(INVALID_VALUE);
}

Code cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    ENTER;
    struct Range *range = NULL;
    for (int i = 0; i < RANGES_MAX && !range; ++i)
        if (ranges[i].behind && ranges[i].bytes && address >= ranges[i].base && address < ranges[i].base + ranges[i].bytes)
            range = &ranges[i];
    int is_pinned = !range && reach(address, 1) != NULL;
    if (!range && !is_pinned) return leave(INVALID_VALUE);
    switch (attribute) {
    case 2: *(unsigned *)value = is_pinned ? 1 : 2; break;
    case 3: *(uint64_t *)value = address; break;
    case 7: *(uint64_t *)value = is_pinned ? 0 : range->number; break;
    case 9: *(int *)value = is_pinned ? gpu_of(current) : range->behind->gpu; break;
    default: return leave(INVALID_VALUE);
    }
    return leave(OK);
}

Code cuMemGetHandleForAddressRange(int *file, uint64_t address, size_t bytes, int kind, unsigned long long flags) {
    (void)flags;
    ENTER;
    long page = sysconf(_SC_PAGESIZE);
    if (kind != 1 || address % (uint64_t)page || bytes % (size_t)page || !setting("FAKE_CUDA_DMA_BUF", 1))
        return leave(NOT_SUPPORTED);
    for (int i = 0; i < RANGES_MAX; ++i)
        if (ranges[i].behind && ranges[i].base == address && bytes <= ranges[i].bytes) {
            *file = fcntl(ranges[i].behind->file, F_DUPFD_CLOEXEC, 0);
            return leave(*file < 0 ? OUT_OF_MEMORY : OK);
        }
    return leave(INVALID_VALUE);
}

int fake_cuda_flushes;

Code cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER;
    int is_known = target == 0 && (scope == 100 || scope == 200); // for the owner, for all devices
    fake_cuda_flushes += is_known;
    if (is_known) flush();
    return leave(is_known ? OK : INVALID_VALUE);
}

Code cuStreamCreate(struct Stream **stream, unsigned flags) {
    (void)flags;
    ENTER;
    *stream = calloc(1, sizeof **stream);
    (*stream)->last = &(*stream)->first;
    (*stream)->next = streams;
    streams = *stream;
    return leave(OK);
}

Code cuStreamDestroy_v2(struct Stream *stream) {
    LOCK;
    // What it waits for may be in another stream.
    while (stream->first)
        for (struct Stream *one = streams; one; one = one->next) advance(one);
    for (struct Stream **one = &streams; *one; one = &(*one)->next)
        if (*one == stream) {
            *one = stream->next;
            break;
        }
    free(stream);
    return leave(OK);
}

Code cuStreamWaitEvent(struct Stream *stream, struct Event *event, unsigned flags) {
    (void)flags;
    ENTER;
    struct Work *work = put(stream, WAIT);
    work->event = event;
    work->version = event->recorded;
    ++event->holders;
    return leave(OK);
}

Code cuEventCreate(struct Event **event, unsigned flags) {
    (void)flags;
    ENTER;
    *event = calloc(1, sizeof **event);
    (*event)->holders = 1;
    return leave(OK);
}

static struct Stream *unmarked; // its last work is a copy behind which no event can be recorded

Code cuEventRecord(struct Event *event, struct Stream *stream) {
    ENTER;
    if (stream && stream == unmarked) return unmarked = NULL, leave(OUT_OF_MEMORY);
    struct Work *work = put(stream, RECORD);
    work->event = event;
    work->version = ++event->recorded;
    ++event->holders;
    return leave(OK);
}

Code cuEventQuery(struct Event *event) {
    ENTER;
    tick();
    return leave(broken ? broken : event->reached < event->recorded ? NOT_READY : OK);
}

Code cuEventDestroy_v2(struct Event *event) {
    LOCK;
    if (--event->holders == 0) free(event);
    return leave(OK);
}

Code cuMemcpyAsync(uint64_t into, uint64_t from, size_t bytes, struct Stream *stream) {
    ENTER;
    if (bytes == (size_t)setting("FAKE_CUDA_UNMARKED_BYTES", 0)) unmarked = stream;
    __atomic_fetch_add(&copies, 1, __ATOMIC_RELAXED);
    struct Work *work = put(stream, COPY);
    work->into = into;
    work->from = from;
    work->bytes = bytes;
    return leave(OK);
}

Code cuMemsetD8Async(uint64_t into, unsigned char byte, size_t bytes, struct Stream *stream) {
    ENTER;
    struct Work *work = put(stream, FILL);
    work->into = into;
    work->from = byte;
    work->bytes = bytes;
    return leave(OK);
}

struct Module { char *text; };
struct Function { void (*kernel)(const struct Arguments *); size_t element_bytes; };

Code cuModuleLoadData(struct Module **module, const char *text) {
    ENTER;
    if (!strstr(text, ".version") || !strstr(text, ".target sm_")) return leave(INVALID_IMAGE);
    *module = malloc(sizeof **module);
    (*module)->text = strdup(text);
    return leave(OK);
}

Code cuModuleUnload(struct Module *module) { free(module->text); free(module); return OK; }

static size_t element_bytes(const char *name) {
    return strstr(name, "64_") ? 8 : strstr(name, "32_") ? 4 : strstr(name, "16_") ? 2 : 1;
}

Code cuModuleGetFunction(struct Function **function, struct Module *module, const char *name) {
    char entry[128];
    Dl_info here;
    ENTER;
    snprintf(entry, sizeof entry, ".entry %s(", name);
    dladdr((void *)cuInit, &here);
    void *library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    void *kernel = library ? dlsym(library, name) : NULL;
    if (!kernel || !strstr(module->text, entry)) return leave(NOT_FOUND);
    *function = malloc(sizeof **function);
    memcpy(&(*function)->kernel, &kernel, sizeof kernel);
    (*function)->element_bytes = element_bytes(name);
    return leave(OK);
}

long fakeCudaLaunches(void) { return __atomic_load_n(&launches, __ATOMIC_RELAXED); }

long fakeCudaCopies(void) { return __atomic_load_n(&copies, __ATOMIC_RELAXED); }

Code cuLaunchKernel(struct Function *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
    unsigned threads_z, unsigned shared, struct Stream *stream, void **parameters, void **extra) {
    ENTER;
    if (!x || y != 1 || z != 1 || threads != 256 || threads_y != 1 || threads_z != 1 || shared || extra)
        return leave(INVALID_VALUE);
    __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    struct Work *work = put(stream, LAUNCH);
    work->kernel = function->kernel;
    work->element_bytes = function->element_bytes;
    work->workers = (u64)x * threads;
    work->arguments = *(const struct Arguments *)parameters[0];
    return leave(OK);
}
