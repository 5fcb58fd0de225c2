// Writing cells (cells.h).
#pragma once
#include "cells.h"
#include "quantise.h"

namespace quire {

// Cells of d numbers that are T: as they are, or rounded to 8 bits with one scale a cell (largest magnitude / 127).
template <class T> struct CellWriter {
    const int64_t d;
    const bool int8;

    int64_t bytes() const { return int8 ? d + SCALE_BYTES : d * (int64_t)sizeof(T); }

    void write(const T* x, char* cell) const {
        if (!int8) {
            memcpy(cell, x, d * sizeof(T));
            return;
        }
        float scale;
        quantise(x, d, (int8_t*)cell, &scale);
        memcpy(cell + d, &scale, SCALE_BYTES);
    }
};

}  // namespace quire
