// Runs a recorded list of calls (`program.py`).

#include "program.h"

#include <chrono>

extern "C" {

struct tw_call {
    void (*run)(const uint64_t*);
    const uint64_t* words;
};

void tw_run(const tw_call* calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i) calls[i].run(calls[i].words);
}

// Nanoseconds of a steady clock, into *at.
void tw_stamp(int64_t* at) {
    *at = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // extern "C"

TW_RECORDABLE(tw_stamp)
