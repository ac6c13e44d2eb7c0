/* The planner's picture: sequences at once against context length, both axes logarithmic. */
#include <math.h>
#include <stdio.h>

#include "client/ctl/plan.h"

#define WIDTH 720
#define HEIGHT 420
#define LEFT 80
#define RIGHT 20
#define TOP 50
#define BOTTOM 50

struct axes {
    double x_low, x_high, y_low, y_high; /* logarithms to base 2 */
};

static double x_at(const struct axes *axes, double tokens)
{
    double span = axes->x_high - axes->x_low;
    return LEFT + (log2(tokens) - axes->x_low) / (span > 0 ? span : 1) * (WIDTH - LEFT - RIGHT);
}

static double y_at(const struct axes *axes, double sequences)
{
    double span = axes->y_high - axes->y_low;
    return HEIGHT - BOTTOM -
           (log2(sequences) - axes->y_low) / (span > 0 ? span : 1) * (HEIGHT - TOP - BOTTOM);
}

static struct axes axes_of(const struct plan_point *points, uint32_t count)
{
    return (struct axes){
        .x_low = log2((double)points[0].context_tokens),
        .x_high = log2((double)points[count - 1].context_tokens),
        .y_low = floor(log2((double)points[count - 1].sequences)),
        .y_high = ceil(log2((double)points[0].sequences)),
    };
}

/* Characters that XML gives a meaning. */
static void text_write(FILE *file, const char *text)
{
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '<':
            (void)fputs("&lt;", file);
            break;
        case '>':
            (void)fputs("&gt;", file);
            break;
        case '&':
            (void)fputs("&amp;", file);
            break;
        default:
            (void)fputc(*text, file);
            break;
        }
    }
}

static void grid_write(FILE *file, const struct axes *axes, const struct plan_point *points,
                       uint32_t count)
{
    int step = (int)ceil((axes->y_high - axes->y_low) / 8);
    step = step < 1 ? 1 : step;
    for (int power = (int)axes->y_low; power <= (int)axes->y_high; power += step) {
        double y = y_at(axes, exp2(power));
        (void)fprintf(file,
                      "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" class=\"grid\"/>"
                      "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.0f</text>\n",
                      LEFT, WIDTH - RIGHT, y, y, LEFT - 8, y + 4, exp2(power));
    }
    for (uint32_t i = 0; i < count; i++) {
        double x = x_at(axes, (double)points[i].context_tokens);
        uint64_t tokens = points[i].context_tokens;
        (void)fprintf(file, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%llu%s</text>\n", x,
                      HEIGHT - BOTTOM + 18,
                      (unsigned long long)(tokens >= 1024 ? tokens / 1024 : tokens),
                      tokens >= 1024 ? "k" : "");
    }
}

bool plan_plot(const char *path, const char *title, const struct plan_point *points, uint32_t count)
{
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        return false;
    }
    struct axes axes = axes_of(points, count);
    (void)fprintf(file,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" "
                  "font-family=\"sans-serif\" font-size=\"12\">\n"
                  "<style>.grid{stroke:#ddd}.line{fill:none;stroke:#2563eb;stroke-width:2}"
                  ".dot{fill:#2563eb}</style>\n"
                  "<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n"
                  "<text x=\"%d\" y=\"28\" font-size=\"16\">Sequences at once: ",
                  WIDTH, HEIGHT, WIDTH, HEIGHT, LEFT);
    text_write(file, title);
    (void)fprintf(file, "</text>\n");
    grid_write(file, &axes, points, count);
    (void)fprintf(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">context, tokens</text>\n",
                  (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10);
    (void)fprintf(file, "<polyline class=\"line\" points=\"");
    for (uint32_t i = 0; i < count; i++) {
        (void)fprintf(file, "%.1f,%.1f ", x_at(&axes, (double)points[i].context_tokens),
                      y_at(&axes, (double)points[i].sequences));
    }
    (void)fprintf(file, "\"/>\n");
    for (uint32_t i = 0; i < count; i++) {
        double x = x_at(&axes, (double)points[i].context_tokens);
        double y = y_at(&axes, (double)points[i].sequences);
        (void)fprintf(file,
                      "<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>"
                      "<text x=\"%.1f\" y=\"%.1f\">%llu</text>\n",
                      x, y, x + 6, y - 6, (unsigned long long)points[i].sequences);
    }
    (void)fprintf(file, "</svg>\n");
    bool written = ferror(file) == 0;
    return fclose(file) == 0 && written;
}
