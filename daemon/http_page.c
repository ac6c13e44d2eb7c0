#include "daemon/http_page.h"

#include <string.h>

/* The assembler takes the files in as they are: no build step, and no array of C for each. */
#define EMBED(symbol, file)                                                                        \
    __asm__(".pushsection .rodata\n"                                                               \
            ".global kvk_page_" symbol "_start\n"                                                  \
            ".global kvk_page_" symbol "_end\n"                                                    \
            "kvk_page_" symbol "_start:\n"                                                         \
            ".incbin \"" KVK_PAGE_FOLDER "/" file "\"\n"                                           \
            "kvk_page_" symbol "_end:\n"                                                           \
            ".byte 0\n"                                                                            \
            ".popsection\n")

EMBED("html", "page.html");
EMBED("css", "page.css");
EMBED("js", "page.js");

extern const unsigned char kvk_page_html_start[], kvk_page_html_end[];
extern const unsigned char kvk_page_css_start[], kvk_page_css_end[];
extern const unsigned char kvk_page_js_start[], kvk_page_js_end[];

const struct kvk_page_file *kvk_page_find(const char *path)
{
    static struct kvk_page_file files[] = {
        {"/", "text/html; charset=utf-8", kvk_page_html_start, 0},
        {"/page.css", "text/css; charset=utf-8", kvk_page_css_start, 0},
        {"/page.js", "text/javascript; charset=utf-8", kvk_page_js_start, 0},
    };
    files[0].size_bytes = (size_t)(kvk_page_html_end - kvk_page_html_start);
    files[1].size_bytes = (size_t)(kvk_page_css_end - kvk_page_css_start);
    files[2].size_bytes = (size_t)(kvk_page_js_end - kvk_page_js_start);
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        if (strcmp(path, files[i].path) == 0) {
            return &files[i];
        }
    }
    return NULL;
}
