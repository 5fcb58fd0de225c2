// Work of the host before a step: the list of work of a decode step on a GPU, and prompt lookup. Integers only.
//
// Semantics of the list: quire/kernels/attention/schedule (`tiles.cut_any`, `stream.cuts`), whose numbers these are.
// Owns no memory; the caller has room for the most lines that there can be.
#include <algorithm>
#include <vector>

#include "quire_cpu.h"

namespace quire {
namespace {

// stream.py has these, and why.
constexpr int64_t KEYS = 64, TILE_COST = 256, SHORTEST = 128, SHORTEST_SHARE = 256, MERGE_COST = 160;

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Line {  // QuireTile in csrc/cuda/attention.h
    int32_t row, n_tokens, position, begin, end, kv_at, blocks_at, partial, kv_head, gathered, unused[2];
};

struct DecodeWork {
    QuireDecodeWork& work;
    std::vector<int64_t> blocks;  // of each span: its keys, in KEYS
    std::vector<int32_t> first;   // and the first of them
    Line* lines;
    int32_t (*merges)[4];
    int64_t n_lines = 0, n_merges = 0, n_parts = 0;
    int64_t led = -1;  // part of the first piece of the tile that was cut last

    explicit DecodeWork(QuireDecodeWork& work)
        : work(work), blocks(work.n_spans), first(work.n_spans), lines((Line*)work.small),
          merges((int32_t(*)[4])work.merges) {
        for (int64_t s = 0; s < work.n_spans; s++) {
            const int64_t end = work.kv_lens[s];
            first[s] = work.window ? (int32_t)(std::max<int64_t>(end - work.window, 0) / KEYS * KEYS) : 0;
            blocks[s] = up(end - first[s], KEYS);
        }
    }

    void open(int64_t span, int64_t head) {
        Line line{};
        line.row = (int32_t)span;
        line.n_tokens = 1;
        line.end = work.kv_lens[span];
        line.position = line.end - 1;
        line.begin = first[span];
        line.kv_at = (int32_t)(work.slots[span] * work.table_stride);
        line.partial = -1;
        line.kv_head = (int32_t)head;
        lines[n_lines++] = line;
        led = -1;
    }

    void add_part(Line& line) {
        line.partial = (int32_t)(n_parts * work.group);
        work.parts[n_parts++] = line.partial;
    }

    // Cuts the newest line, `offset` keys behind its tile's first.
    void cut(int64_t offset) {
        Line& before = lines[n_lines - 1];
        if (led < 0) {
            led = n_parts;
            add_part(before);
            const int32_t merge[4] = {before.row, before.kv_head, (int32_t)led, 1};
            std::copy(merge, merge + 4, merges[n_merges++]);
        }
        Line& line = lines[n_lines++] = before;
        line.begin = first[before.row] + (int32_t)offset;
        before.end = line.begin;
        add_part(line);
        merges[n_merges - 1][3]++;
    }

    // Pieces of each tile, at most `room` in all, such that the longest is shortest.
    std::vector<int64_t> even_pieces(int64_t room) const {
        int64_t sum = 0, most = 0;
        for (const int64_t b : blocks) sum += b, most = std::max(most, b);
        int64_t low = std::max(SHORTEST / KEYS, up(sum, room)), high = std::max(low, most);
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            int64_t n = 0;
            for (const int64_t b : blocks) n += std::max<int64_t>(up(b, middle), 1);
            n <= room ? high = middle : low = middle + 1;
        }
        std::vector<int64_t> pieces;
        for (const int64_t b : blocks) {
            pieces.push_back(std::max<int64_t>(std::min(up(b, low), b * KEYS / SHORTEST), 1));
        }
        return pieces;
    }

    void cut_into(const std::vector<int64_t>& pieces) {
        for (int64_t s = 0; s < work.n_spans; s++) {
            for (int64_t head = 0; head < work.n_kv_heads; head++) {
                open(s, head);
                for (int64_t i = 1; i < pieces[s]; i++) cut(i * blocks[s] / pieces[s] * KEYS);
            }
        }
        for (int64_t cta = 0; cta <= work.n_ctas; cta++) work.queue[cta] = (int32_t)std::min(cta, n_lines);
    }

    // All tiles end to end, cut into equal shares; a cut close to a tile's edge moves there.
    void cut_shares(int64_t total, int64_t n_shares) {
        int64_t share = 1, span = 0, before = 0;  // `before`: cost of the spans before this one
        for (int64_t tile = 0; tile < work.n_spans * work.n_kv_heads; tile++) {
            const int64_t own = tile / work.n_kv_heads;
            open(own, tile % work.n_kv_heads);
            for (; share < n_shares; share++) {
                const int64_t at = share * total / n_shares;
                while (at >= before + cost(span) * work.n_kv_heads) before += cost(span++) * work.n_kv_heads;
                const int64_t head = (at - before) / cost(span), rest = (at - before) % cost(span);
                const int64_t keys = blocks[span] * KEYS, beyond = rest - (TILE_COST - KEYS / 2);
                const int64_t offset = (beyond < 0 ? -up(-beyond, KEYS) : beyond / KEYS) * KEYS;
                const bool edge = keys < 2 * SHORTEST || offset < KEYS || offset > keys - KEYS;
                const int64_t there = span * work.n_kv_heads + head + (edge && 2 * offset >= keys);
                if (there > tile) break;
                if (!edge) cut(std::min(std::max(offset, SHORTEST), keys - SHORTEST));
                work.queue[share] = (int32_t)n_lines - 1;
            }
        }
        for (; share <= work.n_ctas; share++) work.queue[share] = (int32_t)n_lines;
        work.queue[0] = 0;
    }

    int64_t cost(int64_t span) const { return blocks[span] * KEYS + TILE_COST; }

    void make() {
        const int64_t n_heads = work.n_kv_heads;
        int64_t total = 0;
        for (int64_t s = 0; s < work.n_spans; s++) total += cost(s) * n_heads;
        const int64_t n_shares = std::max<int64_t>(1, std::min(work.n_ctas, total / SHORTEST_SHARE));
        if (0 < work.n_spans && work.n_spans * n_heads <= work.n_ctas) {
            const std::vector<int64_t> pieces = even_pieces(work.n_ctas / n_heads);
            int64_t longest = 0, most = 0;
            for (int64_t s = 0; s < work.n_spans; s++) {
                longest = std::max(longest, TILE_COST + up(blocks[s] * KEYS, pieces[s]));
                most = std::max(most, pieces[s]);
            }
            if (longest <= total / n_shares + TILE_COST + KEYS + (most == 1 ? MERGE_COST : 0)) return cut_into(pieces);
        }
        cut_shares(total, n_shares);
    }
};

}  // namespace
}  // namespace quire

void quire_decode_work(QuireDecodeWork* args) {
    quire::DecodeWork work(*args);
    work.make();
    args->n_small = work.n_lines;
    args->n_merges = work.n_merges;
    args->n_parts = work.n_parts;
}

int64_t quire_latest_match(const int32_t* tokens, int64_t n, int64_t shortest, int64_t longest) {
    constexpr int64_t CHUNK = 64;  // tokens that are compared at once
    const int64_t last = n - 1;
    int64_t found = -1, length = shortest - 1;
    for (int64_t end = last - 1; end >= 0 && length < longest; end--) {
        while (end >= CHUNK) {
            int32_t any = 0;
            for (int64_t i = 0; i < CHUNK; i++) any |= tokens[end - i] == tokens[last];
            if (any) break;
            end -= CHUNK;
        }
        if (tokens[end] != tokens[last]) continue;
        const int64_t most = std::min(longest, end + 1);
        int64_t same = 1;
        while (same < most && tokens[end - same] == tokens[last - same]) same++;
        if (same > length) found = end, length = same;
    }
    return found;
}
