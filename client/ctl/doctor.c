/* kvkeepctl doctor: what to look at. Exit code 1 where there is a fault, so that scripts notice. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define LINE_COLUMNS 92
#define INDENT 10

static const char *severity_name(Kvkeep__V1__Finding__Severity severity)
{
    return severity == KVKEEP__V1__FINDING__SEVERITY__SEVERITY_FAULT     ? "fault"
           : severity == KVKEEP__V1__FINDING__SEVERITY__SEVERITY_WARNING ? "warning"
                                                                         : "note";
}

/* Words, broken into lines, behind a label. What a name from outside brings along cannot steer the
 * terminal. */
static void paragraph_print(const char *label, ProtobufCBinaryData text)
{
    (void)printf("  %-*s", INDENT - 2, label);
    size_t column = INDENT;
    for (size_t at = 0; at < text.len;) {
        size_t end = at;
        while (end < text.len && text.data[end] != ' ') {
            end++;
        }
        if (column > INDENT && column + 1 + (end - at) > LINE_COLUMNS) {
            (void)printf("\n%*s", INDENT, "");
            column = INDENT;
        } else if (column > INDENT) {
            (void)putchar(' ');
            column++;
        }
        for (size_t i = at; i < end; i++) {
            (void)putchar(text.data[i] < 0x20 || text.data[i] == 0x7f ? '?' : text.data[i]);
        }
        column += end - at;
        at = end + 1;
    }
    (void)putchar('\n');
}

static void findings_print(const Kvkeep__V1__DoctorResponse *response)
{
    if (response->n_findings == 0) {
        (void)printf("%s checks were made, and there is nothing to say.\n",
                     ctl_count(response->checks));
        return;
    }
    for (size_t i = 0; i < response->n_findings; i++) {
        const Kvkeep__V1__Finding *finding = response->findings[i];
        (void)printf("%s%s: %s [%s]\n", i == 0 ? "" : "\n", severity_name(finding->severity),
                     ctl_text(finding->title), ctl_text(finding->code));
        paragraph_print("seen", finding->evidence);
        paragraph_print("do", finding->action);
    }
    (void)printf("\n%s findings of %s checks.\n", ctl_count(response->n_findings),
                 ctl_count(response->checks));
}

static json_t *findings_json(const Kvkeep__V1__DoctorResponse *response)
{
    json_t *list = json_array();
    for (size_t i = 0; i < response->n_findings; i++) {
        const Kvkeep__V1__Finding *finding = response->findings[i];
        json_array_append_new(list, json_pack("{s:s, s:o, s:o, s:o, s:o}", "severity",
                                              severity_name(finding->severity), "code",
                                              ctl_json_text(finding->code), "title",
                                              ctl_json_text(finding->title), "evidence",
                                              ctl_json_text(finding->evidence), "action",
                                              ctl_json_text(finding->action)));
    }
    return json_pack("{s:o, s:I}", "findings", list, "checks", (json_int_t)response->checks);
}

int ctl_doctor(const struct ctl_options *options, int argc, char **argv)
{
    static const struct option names[] = {{NULL, 0, NULL, 0}};
    static const struct ctl_command command = {
        .name = "doctor", .usage = "  Exit code 1 where there is a fault. Needs admin rights.\n"};
    if (getopt_long(argc, argv, "", names, NULL) != -1 || optind != argc) {
        return ctl_usage(&command, "no arguments");
    }
    int code;
    Kvkeep__V1__DoctorRequest request = KVKEEP__V1__DOCTOR_REQUEST__INIT;
    Kvkeep__V1__DoctorResponse *response =
        ctl_admin_call(options, "/kvkeep.v1.Admin/Doctor", &request.base,
                       &kvkeep__v1__doctor_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(findings_json(response));
    } else {
        findings_print(response);
    }
    for (size_t i = 0; i < response->n_findings; i++) {
        if (response->findings[i]->severity == KVKEEP__V1__FINDING__SEVERITY__SEVERITY_FAULT) {
            code = CTL_FAILED;
        }
    }
    kvkeep__v1__doctor_response__free_unpacked(response, NULL);
    return code;
}
