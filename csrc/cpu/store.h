// Writing entries (entries.h).
#pragma once
#include "entries.h"
#include "quantise.h"

namespace quire {

// Entries of d numbers that are T: as they are, or rounded to 8 bits with one scale an entry (largest magnitude / 127).
template <class T> struct EntryWriter {
    const int64_t d;
    const bool int8;

    int64_t bytes() const { return int8 ? d + SCALE_BYTES : d * (int64_t)sizeof(T); }

    void write(const T* x, char* entry) const {
        if (!int8) {
            memcpy(entry, x, d * sizeof(T));
            return;
        }
        float scale;
        quantise(x, d, (int8_t*)entry, &scale);
        memcpy(entry + d, &scale, SCALE_BYTES);
    }
};

}  // namespace quire
