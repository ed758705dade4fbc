// A memory allocator for torch's CUDA tensors in which a wrong address is always a fault: see guarded_memory.py.
//
// Every tensor has pages of its own. It ends where they end (to 16 bytes), what follows is not mapped, and addresses are
// never used twice. Memory that a CUDA graph was captured with is released with the graph, which goes on to use it.
// New memory is filled with 0xFF: NaN as a float, -1 as an integer.

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

#define FUNCTIONS(F)                                                                                               \
  F(cuMemAddressReserve) F(cuMemCreate) F(cuMemMap) F(cuMemSetAccess) F(cuMemUnmap) F(cuMemRelease) F(cuCtxSynchronize) \
  F(cuCtxGetCurrent) F(cuCtxSetCurrent) F(cuDevicePrimaryCtxRetain) F(cuThreadExchangeStreamCaptureMode) F(cuMemsetD8Async) F(cuMemGetAllocationGranularity)

#define DECLARE(name) static __typeof__(&name) call_##name;
FUNCTIONS(DECLARE)

typedef struct Block {
  struct Block* next;
  CUdeviceptr base, data;
  size_t mapped;
  CUmemGenericAllocationHandle handle;
  int graph, is_free;  // the graph that was being captured, 0 for none
} Block;

enum { BUCKETS = 1 << 16 };
static Block* blocks[BUCKETS];
static Block* waiting;  // freed while a graph was being captured
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t granularity;
static int poison = 1;
static int captures, graphs;  // captures under way; graphs so far
static unsigned long long count;

static void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    fprintf(stderr, "guarded memory: %s returned %d after %llu allocations\n", what, (int)result, count);
    abort();
  }
}
#define CHECK(call) check(call_##call, #call)

static Block** bucket(CUdeviceptr data) { return &blocks[(data >> 4) * 0x9E3779B97F4A7C15ull >> 48]; }

static void load(int device) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) abort();
#define SYMBOL(name)                                                                        \
  if (!(call_##name = (__typeof__(&name))dlsym(library, #name))) {                          \
    fprintf(stderr, "guarded memory: libcuda has no %s\n", #name);                          \
    abort();                                                                                \
  }
  FUNCTIONS(SYMBOL)
  CUmemAllocationProp kind = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
  CHECK(cuMemGetAllocationGranularity(&granularity, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  poison = !getenv("HOLDFAST_GUARD_NO_POISON");
}

static void use_context(int device) {  // a thread of torch's may have none yet
  CUcontext context = NULL;
  CHECK(cuCtxGetCurrent(&context));
  if (context) return;
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
}

static void release(Block* block) {
  CHECK(cuMemUnmap(block->base, block->mapped));  // its addresses stay reserved
  CHECK(cuMemRelease(block->handle));
  free(block);
}

void* guarded_malloc(ssize_t size, int device, CUstream stream) {
  if (size <= 0) return NULL;
  pthread_mutex_lock(&lock);
  if (!granularity) load(device);
  use_context(device);
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CHECK(cuThreadExchangeStreamCaptureMode(&mode));
  Block* block = calloc(1, sizeof *block);
  size_t used = ((size_t)size + 15) / 16 * 16;
  block->mapped = (used + granularity - 1) / granularity * granularity;
  CUmemAllocationProp kind = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
  CUmemAccessDesc access = {.location = kind.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CHECK(cuMemAddressReserve(&block->base, block->mapped + granularity, 0, 0, 0));
  CHECK(cuMemCreate(&block->handle, block->mapped, &kind, 0));
  CHECK(cuMemMap(block->base, block->mapped, 0, block->handle, 0));
  CHECK(cuMemSetAccess(block->base, block->mapped, &access, 1));
  block->data = block->base + block->mapped - used;
  block->graph = captures ? graphs : 0;
  block->next = *bucket(block->data);
  *bucket(block->data) = block;
  ++count;
  if (poison) CHECK(cuMemsetD8Async(block->data, 0xFF, used, stream));
  CHECK(cuThreadExchangeStreamCaptureMode(&mode));
  pthread_mutex_unlock(&lock);
  return (void*)block->data;
}

static void release_waiting(void) {
  if (waiting && !captures && call_cuCtxSynchronize() == CUDA_SUCCESS)
    while (waiting) {
      Block* next = waiting->next;
      release(waiting);
      waiting = next;
    }
}

static void let_wait(Block** at) {
  Block* block = *at;
  *at = block->next;
  block->next = waiting;
  waiting = block;
}

void guarded_free(void* pointer, ssize_t size, int device, CUstream stream) {
  (void)size, (void)stream;
  if (!pointer) return;
  pthread_mutex_lock(&lock);
  use_context(device);
  Block** at = bucket((CUdeviceptr)pointer);
  while (*at && (*at)->data != (CUdeviceptr)pointer) at = &(*at)->next;
  if (*at && (*at)->graph) (*at)->is_free = 1;
  else if (*at) let_wait(at);
  release_waiting();
  pthread_mutex_unlock(&lock);
}

// guarded_memory.py calls these: a capture begins (the number of its graph), a capture ends, a graph is gone.
int guarded_capture_begins(void) {
  pthread_mutex_lock(&lock);
  ++captures;
  const int graph = ++graphs;
  pthread_mutex_unlock(&lock);
  return graph;
}

void guarded_capture_ends(void) {
  pthread_mutex_lock(&lock);
  --captures;
  pthread_mutex_unlock(&lock);
}

void guarded_graph_gone(int graph) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < BUCKETS; ++i)
    for (Block** at = &blocks[i]; *at;)
      if ((*at)->graph != graph) at = &(*at)->next;
      else if ((*at)->is_free) let_wait(at);
      else (*at)->graph = 0;
  pthread_mutex_unlock(&lock);
}
