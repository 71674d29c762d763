// Shows one GPU as SHARED_CARD of them: loaded before CUDA's runtime (LD_PRELOAD), whose calls with a device's number
// it answers. All cards are the same one: its memory and its streams are one context's. NCCL refuses two ranks on one
// GPU of one host, so each process is a host of its own, and they are connected by sockets.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

enum { SUCCESS = 0, INVALID_DEVICE = 101, MEMCPY_DEFAULT = 4 };  // of CUDA's errors and kinds of copies

static __thread int current;  // the card that this thread has chosen

static const char *variable(const char *name) {
    size_t length = strlen(name);
    for (char **entry = environ; entry && *entry; entry++)
        if (!strncmp(*entry, name, length) && (*entry)[length] == '=')
            return *entry + length + 1;
    return NULL;
}

// The cards that this process sees. As CUDA: in the list, those before the first that does not exist.
static int visible(void) {
    const char *every = variable("SHARED_CARD"), *list = variable("CUDA_VISIBLE_DEVICES");
    int all = every ? atoi(every) : 1, seen = 0;
    if (!list)
        return all;
    while (*list) {
        char *end;
        long number = strtol(list, &end, 10);
        if (strncmp(list, "GPU-", 4) && (end == list || number < 0 || number >= all))
            break;
        seen++;
        if (!(list = strchr(list, ',')))
            break;
        list++;
    }
    return seen;
}

char *getenv(const char *name) {
    static __thread char host[32];
    if (!strcmp(name, "CUDA_VISIBLE_DEVICES") && variable(name))
        return visible() ? "0" : "";
    if (!strcmp(name, "NCCL_HOSTID")) {
        snprintf(host, sizeof host, "process-%d", (int)getpid());
        return host;
    }
    return (char *)variable(name);
}

char *secure_getenv(const char *name) {
    return getenv(name);
}

static void *original(const char *name) {
    void *found = NULL;
    for (const char **library = (const char *[]){"libcudart.so.13", "libcudart.so.12", NULL}; !found && *library; library++) {
        void *runtime = dlopen(*library, RTLD_LAZY | RTLD_NOLOAD);
        found = runtime ? dlsym(runtime, name) : NULL;
    }
    if (!found) {
        fprintf(stderr, "shared card: CUDA's runtime has no %s\n", name);
        abort();
    }
    return found;
}

#define ORIGINAL(name) __typeof__(name) *original_##name = original(#name)
#define CHECK(card) if ((card) < 0 || (card) >= visible()) return INVALID_DEVICE

int cudaGetDeviceCount(int *count) {
    ORIGINAL(cudaGetDeviceCount);
    int error = original_cudaGetDeviceCount(count);
    if (error == SUCCESS)
        *count = visible();
    return error;
}

int cudaSetDevice(int card) {
    CHECK(card);
    ORIGINAL(cudaSetDevice);
    int error = original_cudaSetDevice(0);
    if (error == SUCCESS)
        current = card;
    return error;
}

int cudaGetDevice(int *card) {
    ORIGINAL(cudaGetDevice);
    int error = original_cudaGetDevice(card);
    if (error == SUCCESS)
        *card = current;
    return error;
}

int cudaGetDeviceProperties(void *properties, int card) {
    CHECK(card);
    ORIGINAL(cudaGetDeviceProperties);
    return original_cudaGetDeviceProperties(properties, 0);
}

int cudaGetDeviceProperties_v2(void *properties, int card) {
    CHECK(card);
    ORIGINAL(cudaGetDeviceProperties_v2);
    return original_cudaGetDeviceProperties_v2(properties, 0);
}

int cudaDeviceGetAttribute(int *value, int attribute, int card) {
    CHECK(card);
    ORIGINAL(cudaDeviceGetAttribute);
    return original_cudaDeviceGetAttribute(value, attribute, 0);
}

int cudaDeviceGetPCIBusId(char *id, int length, int card) {
    CHECK(card);
    ORIGINAL(cudaDeviceGetPCIBusId);
    return original_cudaDeviceGetPCIBusId(id, length, 0);
}

int cudaDeviceGetDefaultMemPool(void *pool, int card) {
    CHECK(card);
    ORIGINAL(cudaDeviceGetDefaultMemPool);
    return original_cudaDeviceGetDefaultMemPool(pool, 0);
}

int cudaDeviceCanAccessPeer(int *can, int card, int peer) {
    CHECK(card);
    CHECK(peer);
    *can = card != peer;
    return SUCCESS;
}

int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)flags;
    CHECK(peer);
    return SUCCESS;
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream);

int cudaMemcpyPeerAsync(void *to, int card, const void *from, int peer, size_t bytes, void *stream) {
    CHECK(card);
    CHECK(peer);
    ORIGINAL(cudaMemcpyAsync);
    return original_cudaMemcpyAsync(to, from, bytes, MEMCPY_DEFAULT, stream);
}

// Its second field is the device.
int cudaPointerGetAttributes(int *attributes, const void *pointer) {
    ORIGINAL(cudaPointerGetAttributes);
    int error = original_cudaPointerGetAttributes(attributes, pointer);
    if (error == SUCCESS && attributes[1] >= 0)
        attributes[1] = current;
    return error;
}

// What torch asks of the driver itself, which it loads and in which it looks functions up.
static int (*driver_context_state)(int, unsigned *, int *);
static int (*driver_context_retain)(void **, int);

static int context_state(int card, unsigned *flags, int *active) {
    CHECK(card);
    return driver_context_state(0, flags, active);
}

static int context_retain(void **context, int card) {
    CHECK(card);
    return driver_context_retain(context, 0);
}

void *dlsym(void *library, const char *name) {
    static void *(*lookup)(void *, const char *);
    if (!lookup && !(lookup = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34")))
        lookup = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *found = lookup(library, name);
    if (found && !strcmp(name, "cuDevicePrimaryCtxGetState")) {
        driver_context_state = found;
        return context_state;
    }
    if (found && !strcmp(name, "cuDevicePrimaryCtxRetain")) {
        driver_context_retain = found;
        return context_retain;
    }
    return found;
}
