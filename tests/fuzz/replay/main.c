/*
 * A fuzz target without a fuzzer: runs every file of the folders and files that are named once, so
 * that a kept corpus is a test in any build and with any compiler.
 */
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define INPUT_BYTES_MAX (1 << 20)
#define PATH_SIZE 1024

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned long inputs;

static int run_file(const char *path)
{
    static uint8_t buffer[INPUT_BYTES_MAX];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        (void)fprintf(stderr, "cannot read %s\n", path);
        return 1;
    }
    size_t size = fread(buffer, 1, sizeof(buffer), file);
    (void)fclose(file);
    (void)fprintf(stderr, "%s\n", path); /* so that the last line names what ended it */
    /* A copy of its own size, so that reading past its end is seen by a sanitizer. */
    uint8_t *data = malloc(size + (size == 0));
    if (data == NULL) {
        return 1;
    }
    memcpy(data, buffer, size);
    (void)LLVMFuzzerTestOneInput(data, size);
    free(data);
    inputs++;
    return 0;
}

static int run_folder(const char *path)
{
    int failures = 0;
    DIR *folder = opendir(path);
    if (folder == NULL) {
        (void)fprintf(stderr, "cannot read %s\n", path);
        return 1;
    }
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        char file[PATH_SIZE];
        int size = snprintf(file, sizeof(file), "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.' && size > 0 && (size_t)size < sizeof(file)) {
            failures += run_file(file);
        }
    }
    (void)closedir(folder);
    return failures;
}

int main(int argc, char **argv)
{
    int failures = 0;
    (void)LLVMFuzzerTestOneInput((const uint8_t *)"", 0);
    for (int i = 1; i < argc; i++) {
        struct stat status;
        bool folder = stat(argv[i], &status) == 0 && S_ISDIR(status.st_mode);
        failures += folder ? run_folder(argv[i]) : run_file(argv[i]);
    }
    (void)printf("%lu inputs\n", inputs);
    return failures == 0 && inputs > 0 ? 0 : 1;
}
