/* A trainer that needs no library: counts steps, reports them, and resumes from the step that it saved. Until it has
   been restarted once, it goes no further than HOLD. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HOLD = 30 };

static volatile sig_atomic_t stopping = 0;

static void stop(int number) { stopping = number; }

static void save(const char *directory, int step) {
    char path[512], final[512];
    snprintf(path, sizeof path, "%s/step.new", directory);
    snprintf(final, sizeof final, "%s/step", directory);
    FILE *file = fopen(path, "w");
    if (!file) { perror(path); exit(3); }
    fprintf(file, "%d\n", step);
    fclose(file);
    rename(path, final);
}

int main(int count, char **arguments) {
    int last = count > 1 ? atoi(arguments[1]) : 100, step = 0, start, rank = atoi(getenv("RANK"));
    const char *directory = getenv("MESHWRIGHT_CHECKPOINT_DIR"), *report = getenv("MESHWRIGHT_REPORT_FILE");
    struct timespec pause = {0, 100 * 1000 * 1000};
    char path[512];
    signal(SIGTERM, stop);
    mkdir(directory, 0755);
    snprintf(path, sizeof path, "%s/step", directory);
    FILE *file = fopen(path, "r");
    if (file) { if (fscanf(file, "%d", &step) != 1) step = 0; fclose(file); }
    start = step;
    printf("rank %d of %s starts after step %d\n", rank, getenv("WORLD_SIZE"), step);
    fflush(stdout);
    FILE *out = fopen(report, "a");
    if (!out) { perror(report); return 4; }
    setvbuf(out, NULL, _IOLBF, 0);
    while (step < last && !stopping) {
        nanosleep(&pause, NULL);
        if (start == 0 && step >= HOLD) continue;
        step++;
        if (rank == 0) {
            const char *saved = "";
            if (step % 10 == 0) { save(directory, step); saved = ", \"checkpoint\": \"step\""; }
            fprintf(out, "{\"step\": %d, \"total_steps\": %d, \"loss\": %.2f%s}\n", step, last, 4.0 - 0.01 * step, saved);
        } else {
            fprintf(out, "{\"step\": %d}\n", step);
        }
    }
    if (stopping) { if (rank == 0) save(directory, step); return 143; }
    printf("rank %d done\n", rank);
    return 0;
}
