/* Launch shim: stands in for the CUDA entry points that the exported host code of a CuTe DSL
 * kernel calls.
 *
 * Kernel independent. A launch is handed to a callback, everything else answers "success" or a
 * fixed property. The set of functions is the set of undefined symbols of an exported object;
 * their prototypes are those of the public CUDA runtime and driver functions of the same name
 * without the underscore, and for the DSL's own support functions what the call sites in exported
 * objects pass.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct { unsigned x, y, z; } dim3_t;
/* cudaLaunchAttribute: 72 bytes */
typedef struct { unsigned id, pad; unsigned char value[64]; } attribute_t;
typedef struct {
    dim3_t grid, block;
    size_t dynamic_shared;
    void *stream;
    attribute_t *attributes;
    unsigned count;
} config_t; /* cudaLaunchConfig_t */

enum { MAX_ATTRIBUTE = 32 };
typedef struct { char *name; int attribute[MAX_ATTRIBUTE]; } kernel_t;

/* What the callback sees. arguments[i] points at the value of PTX parameter i. */
typedef struct {
    const char *name;
    unsigned grid[3], block[3], cluster[3];
    unsigned cooperative, programmatic_serialization;
    uint64_t dynamic_shared;
    void **arguments;
    int max_dynamic_shared;
} launch_t;
typedef int (*launch_callback)(const launch_t *);

enum { SHARED_OPTIN = 232448, MULTIPROCESSORS = 132, WARP = 32 };
enum {
    ATTR_WARP_SIZE = 10,
    ATTR_MULTIPROCESSORS = 16,
    ATTR_MAJOR = 75,
    ATTR_MINOR = 76,
    ATTR_SHARED_OPTIN = 97
};
enum { FUNC_MAX_DYNAMIC_SHARED = 8 };
enum { LAUNCH_COOPERATIVE = 2, LAUNCH_CLUSTER = 4, LAUNCH_PROGRAMMATIC = 6 };
enum { ERROR_INVALID_VALUE = 1, ERROR_NO_EMULATOR = 999 };

static launch_callback callback;
static int capability[2] = {9, 0};
EXPORT void ptx_emulator_set_launch(launch_callback f) { callback = f; }
EXPORT void ptx_emulator_set_capability(int major, int minor) {
    capability[0] = major;
    capability[1] = minor;
}

/* ---- device */
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { (void)device; return 0; }
int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case ATTR_SHARED_OPTIN: *value = SHARED_OPTIN; break;
    case ATTR_MULTIPROCESSORS: *value = MULTIPROCESSORS; break;
    case ATTR_WARP_SIZE: *value = WARP; break;
    case ATTR_MAJOR: *value = capability[0]; break;
    case ATTR_MINOR: *value = capability[1]; break;
    default: *value = 0;
    }
    return 0;
}

/* ---- library: a kernel handle remembers its name, the key to the PTX */
int _cudaLibraryLoadData(void **library, const void *code, void *jit_options, void **jit_values,
                         unsigned jit_count, void *options, void **values, unsigned count) {
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    *library = (void *)code;
    return 0;
}
int _cudaLibraryUnload(void *library) { (void)library; return 0; }
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    (void)library;
    kernel_t *made = calloc(1, sizeof *made);
    if (!made || !(made->name = malloc(strlen(name) + 1))) return ERROR_INVALID_VALUE;
    strcpy(made->name, name);
    *kernel = made;
    return 0;
}
static int set_attribute(void *kernel, int attribute, int value) {
    if (attribute >= 0 && attribute < MAX_ATTRIBUTE)
        ((kernel_t *)kernel)->attribute[attribute] = value;
    return 0;
}
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    return set_attribute(kernel, attribute, value);
}
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    (void)device;
    return set_attribute(kernel, attribute, value);
}
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)attribute, (void)kernel, (void)device;
    *value = 0; /* asked for static shared memory, which the PTX declares */
    return 0;
}

/* ---- launch */
int _cudaLaunchKernelEx(const config_t *config, const void *function, void **arguments) {
    const kernel_t *kernel = function;
    launch_t launch = {.name = kernel->name,
                       .cluster = {1, 1, 1},
                       .dynamic_shared = config->dynamic_shared,
                       .arguments = arguments,
                       .max_dynamic_shared = kernel->attribute[FUNC_MAX_DYNAMIC_SHARED]};
    memcpy(launch.grid, &config->grid, sizeof launch.grid);
    memcpy(launch.block, &config->block, sizeof launch.block);
    for (unsigned i = 0; i < config->count; i++) {
        const attribute_t *a = &config->attributes[i];
        if (a->id == LAUNCH_CLUSTER) memcpy(launch.cluster, a->value, sizeof launch.cluster);
        if (a->id == LAUNCH_COOPERATIVE) memcpy(&launch.cooperative, a->value, sizeof(unsigned));
        if (a->id == LAUNCH_PROGRAMMATIC)
            memcpy(&launch.programmatic_serialization, a->value, sizeof(unsigned));
    }
    return callback ? callback(&launch) : ERROR_NO_EMULATOR;
}

/* ---- support functions of the generated host code */
int cuda_dialect_init_library_once(void **slot, int (*init)(void **),
                                   int (*load_to_device)(void **, int),
                                   void (*set_error)(const char *kind, const char *message)) {
    if (*slot) return 0;
    void *library = NULL;
    if (init(&library)) {
        set_error("RuntimeError", "emulator: the kernel library failed to initialise");
        return -1;
    }
    if (load_to_device) load_to_device(&library, 0);
    *slot = library;
    return 0;
}
int cuda_dialect_unload_library_once(void **slot) { (void)slot; return 0; }
void CuteDSLRT_TVMFFISetRaisedCudaError(
    void (*set_parts)(const char *kind, const char **parts, int count), int error) {
    char text[64];
    snprintf(text, sizeof text, "emulated CUDA error %d", error);
    const char *parts[1] = {text};
    set_parts("RuntimeError", parts, 1);
}
