// SPDX-License-Identifier: Apache-2.0
// A stand-in for libnvidia-ml.so.1 that describes the machine in SLIPWAY_REHEARSAL_GPUS:
//
//     COUNT,NAME,MIB,CAPABILITY,DRIVER,CUDA,SLICES,MIB_OF_A_SLICE
//     8,NVIDIA H100 80GB HBM3,81559,9.0,580.65.06,13000,0,0
//
// With slices it is one GPU as a container sees it that was given slices of it (MIG): the GPU's own
// memory may not be read. Names and numbers are those of NVML's published interface (nvml.h of
// CUDA 13). Without the variable there is no driver.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
enum { MOST = 64, FIRST_SLICE = MOST, NVLINK_MISSING = 5 };

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef const char *Handle;  // a place in `handles`

static const char handles[2 * MOST];
static struct {
    unsigned int count, slices;
    int major, minor, cuda;
    unsigned long long memory, slice_memory;
    char name[96], driver[80];
} machine;

static int place(Handle device) { return (int)(device - handles); }

static int text(char *to, unsigned int room, const char *from) {
    return snprintf(to, room, "%s", from) < (int)room ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlInit_v2(void) {
    const char *told = getenv("SLIPWAY_REHEARSAL_GPUS");
    int read = told ? sscanf(told, "%u,%95[^,],%llu,%d.%d,%79[^,],%d,%u,%llu", &machine.count,
        machine.name, &machine.memory, &machine.major, &machine.minor, machine.driver,
        &machine.cuda, &machine.slices, &machine.slice_memory) : 0;
    return read == 9 && machine.count <= MOST ? SUCCESS : DRIVER_NOT_LOADED;
}
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) {
    return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "the stand-in's error";
}

int nvmlSystemGetDriverVersion(char *to, unsigned int room) {
    return text(to, room, machine.driver);
}
int nvmlSystemGetCudaDriverVersion_v2(int *to) { *to = machine.cuda; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *to) { *to = machine.cuda; return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned int *to) { *to = machine.count; return SUCCESS; }
int nvmlDeviceGetCount(unsigned int *to) { *to = machine.count; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Handle *to) {
    if (index >= machine.count) return INVALID_ARGUMENT;
    *to = handles + index;
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex(unsigned int index, Handle *to) {
    return nvmlDeviceGetHandleByIndex_v2(index, to);
}
int nvmlDeviceGetIndex(Handle device, unsigned int *to) {
    if (place(device) >= FIRST_SLICE) return INVALID_ARGUMENT;
    *to = (unsigned int)place(device);
    return SUCCESS;
}
int nvmlDeviceGetUUID(Handle device, char *to, unsigned int room) {
    int at = place(device), slice = at >= FIRST_SLICE;
    int written = snprintf(to, room, "%s-00000000-0000-0000-0000-%012d", slice ? "MIG" : "GPU",
        slice ? at - FIRST_SLICE : at);
    return written < (int)room ? SUCCESS : INSUFFICIENT_SIZE;
}
int nvmlDeviceGetHandleByUUID(const char *wanted, Handle *to) {
    char found[64];
    for (unsigned int at = 0; at < FIRST_SLICE + machine.slices; at++) {
        if (at >= machine.count && at < FIRST_SLICE) continue;
        nvmlDeviceGetUUID(handles + at, found, sizeof found);
        if (!strcmp(found, wanted)) { *to = handles + at; return SUCCESS; }
    }
    return NOT_FOUND;
}
int nvmlDeviceGetName(Handle device, char *to, unsigned int room) {
    (void)device;
    return text(to, room, machine.name);
}

int nvmlDeviceGetMemoryInfo(Handle device, Memory *to) {
    int slice = place(device) >= FIRST_SLICE;
    if (machine.slices && !slice) return NO_PERMISSION;
    to->total = (slice ? machine.slice_memory : machine.memory) << 20;
    to->used = 0;
    to->free = to->total;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(Handle device, MemoryV2 *to) {
    Memory found;
    int code = nvmlDeviceGetMemoryInfo(device, &found);
    if (code) return code;
    to->total = to->free = found.total;
    to->reserved = to->used = 0;
    return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(Handle device, int *major, int *minor) {
    (void)device;
    *major = machine.major;
    *minor = machine.minor;
    return SUCCESS;
}
int nvmlDeviceGetP2PStatus(Handle one, Handle other, int what, int *to) {
    (void)one, (void)other, (void)what;
    *to = machine.major == 9 || machine.memory == 40960 ? SUCCESS : NVLINK_MISSING;
    return SUCCESS;
}
// A GPU's address: 00000000:00:00.0, 00000000:01:00.0, and so on.
typedef struct {
    char legacy[16];
    unsigned int domain, bus, device, identifier, subsystem;
    char address[32];
} Pci;
int nvmlDeviceGetPciInfo_v3(Handle device, Pci *to) {
    memset(to, 0, sizeof *to);
    to->bus = (unsigned int)place(device) % MOST;
    snprintf(to->address, sizeof to->address, "00000000:%02X:00.0", to->bus);
    return SUCCESS;
}
int nvmlDeviceGetNumaNodeId(Handle device, unsigned int *to) {
    (void)device, (void)to;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetCpuAffinity(Handle device, unsigned int words, unsigned long *to) {
    (void)device;
    memset(to, 0xff, words * sizeof *to);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Handle device, unsigned int *now, unsigned int *later) {
    (void)device;
    if (machine.major < 8) return NOT_SUPPORTED;
    *now = *later = machine.slices > 0;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(Handle device, unsigned int *to) {
    (void)device;
    *to = machine.slices ? 7 : 0;
    return SUCCESS;
}
int nvmlDeviceGetMigDeviceHandleByIndex(Handle device, unsigned int index, Handle *to) {
    (void)device;
    if (index >= machine.slices) return NOT_FOUND;
    *to = handles + FIRST_SLICE + index;
    return SUCCESS;
}
