// The keys of a span as one list, whatever the layout: where element t lies, and which part of the list a row sees.
// Positions ascend along the list, so what a row sees of it are ranges of elements.
// Rows of a tree have a list each: behind the root's key those of the path's nodes, wherever they lie. So a row's
// arithmetic is that of the same tokens without a tree.
#pragma once
#include <algorithm>
#include <climits>

#include "engine.h"
#include "quire_cpu.h"

namespace quire {

enum Layout { PAGED = 0, RAGGED = 1, SPARSE = 2 };

// The elements that some row of a tile sees: 0 .. end, without gap_begin .. gap_end.
struct Seen {
    int32_t end, gap_begin, gap_end;
};

class KeyList {
  public:
    KeyList(const QuireAttnPlan& plan, int span)
        : p(plan), kv_at(plan.kv_at[span]), kv_len(plan.kv_lens[span]) {
        if (p.tree_paths != nullptr && p.tree_firsts[span] < kv_len) first_node = p.tree_firsts[span];
        if (p.layout != SPARSE) return;
        blocks = p.blocks + p.block_indptr[span];
        n_blocks = p.block_indptr[span + 1] - p.block_indptr[span];
    }

    // Elements whose position is less than this one.
    int32_t below(int64_t position) const {
        if (position > kv_len) position = kv_len;
        if (position <= 0) return 0;
        if (p.layout != SPARSE) return (int32_t)position;
        int32_t low = 0, high = n_blocks;  // the first block that begins at `position` or later
        while (low < high) {
            const int32_t middle = (low + high) / 2;
            if ((int64_t)blocks[middle] * p.page_size < position) low = middle + 1;
            else high = middle;
        }
        if (low == 0) return 0;
        const int64_t inside = position - (int64_t)blocks[low - 1] * p.page_size;
        return (low - 1) * p.page_size + (int32_t)(inside < p.page_size ? inside : p.page_size);
    }

    int32_t size() const { return below(kv_len); }

    bool is_tree() const { return first_node != INT_MAX; }

    // Elements that all rows of a tree have, which are those up to the root.
    int32_t n_shared() const { return first_node; }

    // Where a row of a tree stands.
    int64_t position_of(uint64_t nodes) const { return first_node - 1 + __builtin_popcountll(nodes); }

    // The list of one row of a tree.
    KeyList along(uint64_t nodes) const {
        KeyList list = *this;
        list.path = nodes;
        return list;
    }

    // Find elements first .. first + KEYS - 1; those at or beyond seen.end are not valid, those of the gap are zeros:
    // behind its window a sequence has no pages, and what lies there may be anything.
    template <bool POSITIONS, class T>
    void locate(
        const QuireAttnArgs& a, int64_t head, int32_t first, Seen seen, const T* zeros, KeyBlock<T>& to) const {
        const int32_t last = first + KEYS < seen.end ? first + KEYS : seen.end;
        const int64_t k_token = a.k_token, v_token = a.v_token;
        for (int32_t t = first; t < last;) {
            const int32_t at = t < first_node ? t : first_node + nth_bit(path, t - first_node);
            const int32_t entry = at / p.page_size, offset = at % p.page_size;
            const int32_t end = t < first_node ? std::min(last, first_node) : t + 1;
            const int32_t left = p.layout == RAGGED ? last - t : p.page_size - offset;
            const int32_t n = left < end - t ? left : end - t;
            const T *k = (const T*)a.k + head * a.k_head, *v = (const T*)a.v + head * a.v_head;
            int32_t position = t;
            if (p.layout == RAGGED) {
                k += (kv_at + t) * k_token;
                v += (kv_at + t) * v_token;
            } else {
                const int32_t logical = p.layout == SPARSE ? blocks[entry] : entry;
                const int64_t page = p.page_table[kv_at * p.table_stride + logical];
                if (p.layout == SPARSE) position = logical * p.page_size + offset;
                k += page * a.k_page + offset * k_token;
                v += page * a.v_page + offset * v_token;
            }
            const T **keys = to.keys + (t - first), **values = to.values + (t - first);
            for (int i = 0; i < n; i++) {
                keys[i] = k + i * k_token;
                values[i] = v + i * v_token;
                if constexpr (POSITIONS) to.positions[t - first + i] = position + i;
            }
            t += n;
        }
        for (int32_t t = std::max(first, seen.gap_begin); t < std::min(last, seen.gap_end); t++)
            to.keys[t - first] = to.values[t - first] = zeros;
        to.n = last > first ? last - first : 0;
        for (int j = to.n; j < KEYS; j++) {
            to.keys[j] = to.values[j] = zeros;
            if constexpr (POSITIONS) to.positions[j] = to.n > 0 ? to.positions[to.n - 1] : 0;
        }
    }

  private:
    const QuireAttnPlan& p;
    int64_t kv_at, kv_len;
    const int32_t* blocks = nullptr;
    int32_t n_blocks = 0;
    int32_t first_node = INT_MAX;
    uint64_t path = 0;

    static int32_t nth_bit(uint64_t word, int32_t n) {
        for (; n > 0; n--) word &= word - 1;
        return __builtin_ctzll(word);
    }
};

}  // namespace quire
