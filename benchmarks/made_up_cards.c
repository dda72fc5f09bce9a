// The functions of CUDA's libraries from which torch learns what card it runs on. made_up_cards.py adds all others, which do nothing.
// MADE_UP_CUDNN is cuDNN's number, 91900 for 9.19.0; MADE_UP_CUDA that of the driver, 13000 for 13.0.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const int CARDS[] = {75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121};
static __thread int current = 0;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

int cudaGetDeviceCount(int *count) { *count = sizeof CARDS / sizeof *CARDS; return 0; }
int cudaGetDevice(int *device) { *device = current; return 0; }
int cudaSetDevice(int device) { current = device; return 0; }

// The places of cudaDeviceProp, the same in CUDA 12 and 13 as far as they are written here.
int cudaGetDeviceProperties(char *p, int device) {
    memset(p, 0, 900);
    sprintf(p, "made-up sm_%d", CARDS[device]);
    p[256] = device + 1;                 // uuid
    *(size_t *)(p + 288) = 80ull << 30;  // totalGlobalMem
    *(size_t *)(p + 296) = 48 << 10;     // sharedMemPerBlock
    *(int *)(p + 304) = 65536;           // regsPerBlock
    *(int *)(p + 308) = 32;              // warpSize
    *(int *)(p + 320) = 1024;            // maxThreadsPerBlock
    *(int *)(p + 324) = *(int *)(p + 328) = 1024, *(int *)(p + 332) = 64;
    *(int *)(p + 336) = 2147483647, *(int *)(p + 340) = *(int *)(p + 344) = 65535;
    *(int *)(p + 360) = CARDS[device] / 10;
    *(int *)(p + 364) = CARDS[device] % 10;
    *(int *)(p + 384) = *(int *)(p + 388) = 132;  // multiProcessorCount, in CUDA 13 and 12
    return 0;
}
int cudaGetDeviceProperties_v2(char *p, int device) { return cudaGetDeviceProperties(p, device); }

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 75: *value = CARDS[device] / 10; break;
        case 76: *value = CARDS[device] % 10; break;
        case 16: *value = 132; break;         // multiprocessors
        case 97: *value = 227 * 1024; break;  // shared memory that a block may opt into
        case 39: *value = 2048; break;        // threads of a multiprocessor
        default: *value = 0;
    }
    return 0;
}
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }
int cudaDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:00:00.0"); return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
int cudaGetDeviceFlags(unsigned *flags) { *flags = 0; return 0; }

int cudaDriverGetVersion(int *version) { *version = number("MADE_UP_CUDA", 13000); return 0; }
int cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
size_t cudnnGetVersion(void) { return number("MADE_UP_CUDNN", 91900); }
size_t cudnnGetCudartVersion(void) { return number("MADE_UP_CUDA", 13000); }
int cudnnGetProperty(int which, int *value) {
    long all = cudnnGetVersion();
    *value = which == 0 ? all / 10000 : which == 1 ? all / 100 % 100 : all % 100;
    return 0;
}
int ncclGetVersion(int *version) { *version = 22700; return 0; }

// Memory of the host that nobody writes to, at addresses as CUDA gives them.
int cudaMalloc(void **pointer, size_t size) {
    const size_t block = 2 << 20;
    char *found = mmap(0, size + block, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *pointer = (void *)(((size_t)found + block - 1) & ~(block - 1));
    return 0;
}
int cudaMallocAsync(void **pointer, size_t size, void *stream) { return cudaMalloc(pointer, size); }
int cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return cudaMalloc(pointer, size); }
int cudaFree(void *pointer) { return 0; }
int cudaFreeHost(void *pointer) { return 0; }
int cudaMemGetInfo(size_t *available, size_t *all) { *available = 70ull << 30, *all = 80ull << 30; return 0; }
int cudaPointerGetAttributes(void *attributes, void *pointer) { memset(attributes, 0, 24); *(int *)attributes = 2; return 0; }

const char *cudaGetErrorString(int error) { return "made up"; }
const char *cudaGetErrorName(int error) { return "made up"; }
const char *cudnnGetErrorString(int error) { return "made up"; }
int cuGetErrorString(int error, const char **text) { *text = "made up"; return 0; }

static int nothing(void) { return 0; }
int cudaGetDriverEntryPoint(const char *name, void **f, unsigned long flags, int *state) {
    *f = nothing;
    if (state) *state = 0;
    return 0;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long flags, int *state) {
    return cudaGetDriverEntryPoint(name, f, flags, state);
}

int cudnnCreate(void **handle) { *handle = (void *)0x1000; return 0; }
int cublasCreate_v2(void **handle) { *handle = (void *)0x1000; return 0; }
int cudaStreamIsCapturing(void *stream, int *state) { *state = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *state, void *id) { *state = 0; return 0; }
int cudaStreamGetCaptureInfo_v2(void *stream, int *state, void *id) { *state = 0; return 0; }
int cudaStreamGetCaptureInfo_v3(void *stream, int *state, void *id) { *state = 0; return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    static long last = 0x100;
    *stream = (void *)(last += 16);
    return 0;
}
int cudaEventCreateWithFlags(void **event, unsigned flags) { return cudaStreamCreateWithPriority(event, flags, 0); }
