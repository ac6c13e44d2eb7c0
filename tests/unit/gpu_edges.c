/* The edges of tests/gpu_edges.h on every set of kernels. */
#include "tests/gpu_edges.h"
#include "tests/unit/gpu_everywhere.h"

Test(gpu_edges, on_every_set_of_kernels, .timeout = 240)
{
    for (size_t i = 0; i < GPU_EDGE_COUNT; i++) {
        gpu_run_everywhere(gpu_edges[i].name, gpu_edges[i].run);
    }
}
