// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1: the symbols without which vLLM's extension cannot be loaded. Each
// answers CUDA_ERROR_NO_DEVICE, so that nothing can be computed by mistake.
enum { NO_DEVICE = 100 };

int cuGetProcAddress_v2(void) { return NO_DEVICE; }
int cuPointerGetAttribute(void) { return NO_DEVICE; }
int cuTensorMapEncodeTiled(void) { return NO_DEVICE; }
