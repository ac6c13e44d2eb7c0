/* A configuration file is read exactly or refused with file, line, field and limit. */
#include "base/options.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/random.h"

/* ---- A table with a field of every kind ---- */

struct guest {
    char name[KVK_OPTION_LABEL_SIZE];
    uint64_t share_bytes;
    char token[40];
};

struct house {
    struct {
        uint64_t bytes;
        uint32_t small_bytes;
        uint64_t wait_ms;
        uint32_t count;
        uint32_t mode;
        bool loud;
        char path[16];
        uint32_t colour;
        int custom;
    } main;
    struct {
        uint32_t doors;
    } rest;
    struct guest guests[3];
    uint32_t guest_count;
};

static const char *const colours[] = {"red", "green", "blue", NULL};

static bool read_custom(void *record, void *member, const char *text, char *reason,
                        size_t reason_size)
{
    (void)record;
    if (text[0] != '!') {
        (void)snprintf(reason, reason_size, "must begin with !");
        return false;
    }
    int length = (int)strlen(text);
    memcpy(member, &length, sizeof(length));
    return true;
}

static const struct kvk_option_field main_fields[] = {
    {.name = "bytes",
     .kind = KVK_OPTION_SIZE,
     KVK_OPTION_AT(struct house, main.bytes),
     .fallback = "1 GiB",
     .minimum = 4096,
     .maximum = UINT64_C(8) << 40,
     .help = "How many bytes."},
    {.name = "small",
     .kind = KVK_OPTION_SIZE,
     KVK_OPTION_AT(struct house, main.small_bytes),
     .fallback = "0",
     .help = "Fewer bytes."},
    {.name = "wait",
     .kind = KVK_OPTION_DURATION,
     KVK_OPTION_AT(struct house, main.wait_ms),
     .fallback = "90 s",
     .minimum = 1,
     .maximum = 86400000,
     .help = "How long."},
    {.name = "count",
     .kind = KVK_OPTION_COUNT,
     KVK_OPTION_AT(struct house, main.count),
     .fallback = "3",
     .minimum = 1,
     .maximum = 64,
     .help = "How many."},
    {.name = "mode",
     .kind = KVK_OPTION_MODE,
     KVK_OPTION_AT(struct house, main.mode),
     .fallback = "0600",
     .maximum = 0777,
     .help = "Who may."},
    {.name = "loud",
     .kind = KVK_OPTION_BOOL,
     KVK_OPTION_AT(struct house, main.loud),
     .fallback = "no",
     .help = "Whether."},
    {.name = "path",
     .kind = KVK_OPTION_TEXT,
     KVK_OPTION_AT(struct house, main.path),
     .fallback = "",
     .help = "Where."},
    {.name = "colour",
     .kind = KVK_OPTION_CHOICE,
     KVK_OPTION_AT(struct house, main.colour),
     .fallback = "green",
     .choices = colours,
     .help = "Which."},
    {.name = "custom",
     .kind = KVK_OPTION_CUSTOM,
     KVK_OPTION_AT(struct house, main.custom),
     .fallback = "!",
     .read = read_custom,
     .help = "What."},
};

static const struct kvk_option_field rest_fields[] = {
    {.name = "doors",
     .kind = KVK_OPTION_COUNT,
     KVK_OPTION_AT(struct house, rest.doors),
     .fallback = "2",
     .help = "How many doors."},
};

static const struct kvk_option_field guest_fields[] = {
    {.name = "share",
     .kind = KVK_OPTION_SIZE,
     KVK_OPTION_AT(struct guest, share_bytes),
     .fallback = "1 MiB",
     .help = "How much."},
    {.name = "token",
     .kind = KVK_OPTION_TEXT,
     KVK_OPTION_AT(struct guest, token),
     .minimum = 4,
     .secret = true,
     .help = "The word."},
};

static enum kvk_status open_guest(void *target, const char *label, void **record,
                                  struct kvk_error *error)
{
    struct house *house = target;
    if (strcmp(label, "nobody") == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "", "nobody is no guest");
    }
    struct guest *guest = &house->guests[house->guest_count++];
    (void)snprintf(guest->name, sizeof(guest->name), "%s", label);
    *record = guest;
    return KVK_OK;
}

static const struct kvk_option_section sections[] = {
    {.name = "main", .help = "The house.", .fields = main_fields, .field_count = 9},
    {.name = "rest", .help = "The rest.", .fields = rest_fields, .field_count = 1},
    {.name = "guest",
     .help = "Somebody.",
     .fields = guest_fields,
     .field_count = 2,
     .open = open_guest,
     .count_max = 3},
};
static const struct kvk_option_table table = {sections, 3};

static enum kvk_status load(struct house *house, const char *text, struct kvk_error *error)
{
    memset(house, 0, sizeof(*house));
    kvk_options_init(&table, house);
    return kvk_options_load_text(&table, house, "house.conf", text, strlen(text), error);
}

static void assert_loads(struct house *house, const char *text)
{
    struct kvk_error error = {.status = KVK_OK};
    cr_assert_eq(load(house, text, &error), KVK_OK, "%s", error.text);
}

static void assert_refused(const char *text, const char *field, const char *sentence)
{
    struct house house;
    struct kvk_error error = {.status = KVK_OK};
    cr_assert_eq(load(&house, text, &error), KVK_INVALID, "%s", text);
    cr_assert_eq(error.cause, KVK_CAUSE_FIELD);
    cr_assert_str_eq(error.text, sentence);
    cr_assert_str_eq(error.field, field);
}

/* ---- Reading ---- */

static void assert_defaults(const struct house *house)
{
    cr_assert_eq(house->main.bytes, UINT64_C(1) << 30);
    cr_assert_eq(house->main.small_bytes, 0);
    cr_assert_eq(house->main.wait_ms, 90000);
    cr_assert_eq(house->main.count, 3);
    cr_assert_eq(house->main.mode, 0600);
    cr_assert_not(house->main.loud);
    cr_assert_str_eq(house->main.path, "");
    cr_assert_eq(house->main.colour, 1);
    cr_assert_eq(house->main.custom, 1);
    cr_assert_eq(house->rest.doors, 2);
    cr_assert_eq(house->guest_count, 0);
}

Test(base_options, defaults)
{
    struct house house;
    assert_loads(&house, "");
    assert_defaults(&house);
    assert_loads(&house, "# nothing\n\n   ; here\n[main]\n[rest]");
    assert_defaults(&house);
}

Test(base_options, every_kind)
{
    struct house house;
    assert_loads(&house, "\xef\xbb\xbf[main]\r\n"
                         "bytes=8 TiB\r\n"
                         "  small = 4095MiB   # nearly all\n"
                         "wait =2 min\n"
                         "count\t=\t64 ; most\n"
                         "mode = 0755\n"
                         "loud = yes\n"
                         "path = \" a#b;c \" # with quotes\n"
                         "colour = blue\n"
                         "custom = !a#b\n"
                         "[guest alice]\n"
                         "token = word\n"
                         "[ guest  bob the builder ]\n"
                         "share = 0\n"
                         "token = other\n"
                         "[rest]\n"
                         "doors = 4294967295");
    cr_assert_eq(house.main.bytes, UINT64_C(8) << 40);
    cr_assert_eq(house.main.small_bytes, UINT32_C(4095) << 20);
    cr_assert_eq(house.main.wait_ms, 120000);
    cr_assert_eq(house.main.count, 64);
    cr_assert_eq(house.main.mode, 0755);
    cr_assert(house.main.loud);
    cr_assert_str_eq(house.main.path, " a#b;c ");
    cr_assert_eq(house.main.colour, 2);
    cr_assert_eq(house.main.custom, 4);
    cr_assert_eq(house.guest_count, 2);
    cr_assert_str_eq(house.guests[0].name, "alice");
    cr_assert_eq(house.guests[0].share_bytes, 1 << 20);
    cr_assert_str_eq(house.guests[1].name, "bob the builder");
    cr_assert_eq(house.guests[1].share_bytes, 0);
    cr_assert_str_eq(house.guests[1].token, "other");
    cr_assert_eq(house.rest.doors, UINT32_MAX);
}

Test(base_options, numbers_that_are_none)
{
    assert_refused("[main]\nbytes = NaN\n", "main.bytes",
                   "house.conf:2: main.bytes: \"NaN\" is not a whole number");
    assert_refused("[main]\n\nbytes = -1\n", "main.bytes",
                   "house.conf:3: main.bytes: \"-1\" must not be negative");
    assert_refused("[main]\nbytes = 1\n", "main.bytes",
                   "house.conf:2: main.bytes: \"1\" needs a unit: B, KiB, MiB, GiB or TiB");
    assert_refused("[main]\nbytes = 4 GiB x\n", "main.bytes",
                   "house.conf:2: main.bytes: \"4 GiB x\" needs a unit: B, KiB, MiB, GiB or TiB");
    assert_refused("[main]\nbytes = 1.5 GiB\n", "main.bytes",
                   "house.conf:2: main.bytes: \"1.5 GiB\" must be a whole number");
    assert_refused("[main]\nbytes = 0\n", "main.bytes",
                   "house.conf:2: main.bytes: \"0\" must be 4 KiB to 8 TiB");
    assert_refused("[main]\nbytes = 4095 B\n", "main.bytes",
                   "house.conf:2: main.bytes: \"4095 B\" must be 4 KiB to 8 TiB");
    assert_refused("[main]\nbytes = 9 TiB\n", "main.bytes",
                   "house.conf:2: main.bytes: \"9 TiB\" must be 4 KiB to 8 TiB");
    assert_refused("[main]\nbytes = 99999999999 TiB\n", "main.bytes",
                   "house.conf:2: main.bytes: \"99999999999 TiB\" is too large a number");
    assert_refused("[main]\nbytes = 99999999999999999999 B\n", "main.bytes",
                   "house.conf:2: main.bytes: \"99999999999999999999 B\" is too large a number");
    assert_refused("[main]\nsmall = 4 GiB\n", "main.small",
                   "house.conf:2: main.small: \"4 GiB\" must be 0 B to 4294967295 B");
    assert_refused("[main]\nwait = 5\n", "main.wait",
                   "house.conf:2: main.wait: \"5\" needs a unit: ms, s, min or h");
    assert_refused("[main]\nwait = 25 h\n", "main.wait",
                   "house.conf:2: main.wait: \"25 h\" must be 1 ms to 24 h");
    assert_refused("[main]\ncount = 65\n", "main.count",
                   "house.conf:2: main.count: \"65\" must be 1 to 64");
    assert_refused("[main]\ncount = 3x\n", "main.count",
                   "house.conf:2: main.count: \"3x\" must be a whole number and nothing else");
    assert_refused("[main]\ncount =\n", "main.count",
                   "house.conf:2: main.count: \"\" is not a whole number");
    assert_refused("[main]\nmode = 0800\n", "main.mode",
                   "house.conf:2: main.mode: \"0800\" must be a whole number and nothing else");
    assert_refused("[main]\nmode = 01000\n", "main.mode",
                   "house.conf:2: main.mode: \"01000\" must be 0000 to 0777");
}

Test(base_options, words_that_are_none)
{
    assert_refused("[main]\nloud = maybe\n", "main.loud",
                   "house.conf:2: main.loud: \"maybe\" must be yes or no");
    assert_refused("[main]\ncolour = pink\n", "main.colour",
                   "house.conf:2: main.colour: \"pink\" must be red, green or blue");
    assert_refused("[main]\npath = 0123456789abcdef\n", "main.path",
                   "house.conf:2: main.path: \"0123456789abcdef\" must be 0 to 15 bytes of UTF-8");
    assert_refused("[main]\npath = \"open\n", "main.path",
                   "house.conf:2: main.path: a quote without its pair");
    assert_refused("[main]\npath = a\"b\n", "main.path",
                   "house.conf:2: main.path: a quote without its pair");
    assert_refused("[main]\ncustom = x\n", "main.custom",
                   "house.conf:2: main.custom: \"x\" must begin with !");
    assert_refused("[guest a]\ntoken = abc\n", "guest a.token",
                   "house.conf:2: guest a.token: must be 4 to 39 bytes of UTF-8");
}

Test(base_options, structure)
{
    assert_refused("bytes = 1 GiB\n", "",
                   "house.conf:1: \"bytes\" stands before the first [section]");
    assert_refused("[main]\nfast = yes\n", "main.fast", "house.conf:2: main.fast: no such field");
    assert_refused("[cellar]\n", "", "house.conf:1: no section is named [cellar]");
    assert_refused("[]\n", "", "house.conf:1: no section is named []");
    assert_refused("[main\n", "", "house.conf:1: a [section] without its \"]\"");
    assert_refused("[main]\nnonsense\n", "main",
                   "house.conf:2: main: \"nonsense\" is neither [section] nor name = value");
    assert_refused("[main]\ncount = 1\ncount = 1\n", "main.count",
                   "house.conf:3: main.count: comes twice in this section");
    assert_refused("[main]\n[rest]\n[main]\n", "main",
                   "house.conf:3: main: the section comes twice");
    assert_refused("[main x]\n", "main x", "house.conf:1: main x: takes no name");
    assert_refused("[guest]\n", "guest", "house.conf:1: guest: needs a name: [guest NAME]");
    assert_refused("[guest a]\ntoken = word\n[guest a]\n", "guest a",
                   "house.conf:3: guest a: the section comes twice");
    assert_refused("[main]\n[guest a]\n[rest]\n", "guest a.token",
                   "house.conf:2: guest a.token: is missing");
    assert_refused("[guest a]\n", "guest a.token", "house.conf:1: guest a.token: is missing");
    assert_refused("[guest nobody]\n", "guest nobody",
                   "house.conf:1: guest nobody: nobody is no guest");
    assert_refused("[guest a]\ntoken=word\n[guest b]\ntoken=word\n[guest c]\ntoken=word\n"
                   "[guest d]\ntoken=word\n",
                   "guest d", "house.conf:7: guest d: more than 3 of these sections");
    assert_refused("[main]\npath = \xff\n", "main", "house.conf:2: main: the line is not UTF-8");
}

Test(base_options, lines_and_names_have_limits)
{
    static char text[10000];
    struct house house;
    struct kvk_error error;
    memset(text, ' ', sizeof(text));
    memcpy(text, "[main]\n", 7);
    memcpy(text + 9000, "count = 4\n", 11);
    cr_assert_eq(load(&house, text, &error), KVK_INVALID);
    cr_assert_str_eq(error.text, "house.conf:2: main: the line is longer than 8191 bytes");

    memset(text, 'n', sizeof(text));
    memcpy(text, "[guest ", 7);
    memcpy(text + 7 + KVK_OPTION_LABEL_SIZE, "]\n", 3);
    cr_assert_eq(load(&house, text, &error), KVK_INVALID);
    cr_assert_not_null(strstr(error.text, "the name is longer than 255 bytes"));

    cr_assert_eq(kvk_options_load_text(&table, &house, "f", "[main]\n\0", 8, &error), KVK_INVALID);
}

/* ---- Files ---- */

Test(base_options, files)
{
    char path[] = "/tmp/kvkeep-options-XXXXXX";
    int descriptor = mkstemp(path);
    cr_assert_geq(descriptor, 0);
    cr_assert_eq(write(descriptor, "[main]\ncount = 9\n", 17), 17);
    struct house house;
    struct kvk_error error;
    kvk_options_init(&table, &house);
    cr_assert_eq(kvk_options_load(&table, &house, path, &error), KVK_OK, "%s", error.text);
    cr_assert_eq(house.main.count, 9);
    cr_assert_eq(ftruncate(descriptor, (off_t)KVK_OPTION_FILE_BYTES_MAX + 1), 0);
    cr_assert_eq(kvk_options_load(&table, &house, path, &error), KVK_INVALID);
    cr_assert_not_null(strstr(error.text, "larger than 4 MiB"));
    cr_assert_eq(close(descriptor), 0);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(kvk_options_load(&table, &house, path, &error), KVK_INVALID);
    cr_assert_not_null(strstr(error.text, "No such file"));
    cr_assert_eq(kvk_options_load(&table, &house, "/", &error), KVK_INVALID);
}

/* What is printed as the default file reads back as the defaults. */
Test(base_options, the_printed_file_says_the_defaults)
{
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    kvk_options_print(&table, file);
    cr_assert_eq(fclose(file), 0);
    struct house house;
    assert_loads(&house, text);
    assert_defaults(&house);
    cr_assert_not_null(strstr(text, "# How many bytes.\n# (4 KiB to 8 TiB)\nbytes = 1 GiB\n"));
    cr_assert_not_null(strstr(text, "path = \"\"\n"));
    cr_assert_not_null(strstr(text, "# [guest NAME]\n"));
    cr_assert_not_null(strstr(text, "# share = 1 MiB\n"));
    free(text);

    file = open_memstream(&text, &size);
    kvk_options_print_markdown(&table, file);
    cr_assert_eq(fclose(file), 0);
    cr_assert_not_null(strstr(text, "## `[guest NAME]`"));
    cr_assert_not_null(strstr(text, "| `wait` | `90 s` | 1 ms to 24 h | How long. |"));
    free(text);
}

/* Damaged files are refused or read, and nothing else happens. */
Test(base_options, damaged_files)
{
    static const char good[] = "[main]\nbytes = 8 TiB\nwait = 2 min\npath = \"a b\"\n"
                               "colour = blue\n[guest alice]\ntoken = word\n";
    struct kvk_random random;
    kvk_random_init(&random, 8);
    for (int round = 0; round < 20000; round++) {
        char text[sizeof(good)];
        memcpy(text, good, sizeof(good));
        uint64_t changes = kvk_random_between(&random, 1, 4);
        for (uint64_t i = 0; i < changes; i++) {
            uint64_t at = kvk_random_below(&random, sizeof(good) - 1);
            text[at] = kvk_random_chance(&random, 0.5)
                           ? (char)kvk_random_next(&random)
                           : good[kvk_random_below(&random, sizeof(good) - 1)];
        }
        struct house house;
        struct kvk_error error = {.status = KVK_OK};
        memset(&house, 0, sizeof(house));
        kvk_options_init(&table, &house);
        enum kvk_status status =
            kvk_options_load_text(&table, &house, "f", text, sizeof(text) - 1, &error);
        cr_assert(status == KVK_OK || (status == KVK_INVALID && error.text[0] != '\0'));
    }
}
