//! Executor `grouped-t3`: groups of every size, all forms, waves.

use half::f16;
use horizon_core::qpacked::BlockSize;
use horizon_core::record::{ExpertEncoding, RecordLayout, RecordTiling};
use horizon_core::roles::ExpertMatrix;
use horizon_kernels_cuda::args::{ExpertsArgs, GroupedArgs, GroupedIndexArgs};
use horizon_kernels_cuda::driver::DevicePtr;
use horizon_kernels_cuda::executors::grouped_t3::{ABSENT, GroupedForm, Groups, WORK_BYTES};
use horizon_kernels_cuda::tiling::{FragmentTiles, RecordTiles};

use crate::common::{Bench, Random, bits, close, sum_error};

const NULL: DevicePtr = DevicePtr(0);

/// A layer's experts, on the host and in slots.
struct Layer {
    layout: RecordLayout,
    tiles: RecordTiles,
    records: Vec<Vec<u8>>,
    arena: DevicePtr,
    /// Slot of each expert.
    slots: Vec<u32>,
}

fn layer(
    bench: &Bench,
    random: &mut Random,
    shape: (usize, usize),
    experts: usize,
    encoding: ExpertEncoding,
) -> Layer {
    let layout = RecordLayout::of_shape(shape.0, shape.1, encoding);
    let tiles = RecordTiles::new(&layout);
    let records: Vec<Vec<u8>> = (0..experts)
        .map(|_| {
            let mut record = vec![0u8; layout.bytes];
            for m in &layout.matrices {
                let packed = matches!(encoding, ExpertEncoding::Qpacked { .. });
                if packed {
                    record[m.values.clone()].fill_with(|| random.bits() as u8);
                    let scales = random.halves(m.scales.len() / 2, 0.03);
                    record[m.scales.clone()].copy_from_slice(bytemuck::cast_slice(&scales));
                } else {
                    let values = random.halves(m.values.len() / 2, 0.2);
                    record[m.values.clone()].copy_from_slice(bytemuck::cast_slice(&values));
                }
            }
            record
        })
        .collect();
    // Slots in an order of their own, with one that nobody uses (and that holds NaN).
    let slots: Vec<u32> = (0..experts)
        .map(|e| ((e * 5 + 2) % (experts + 1)) as u32)
        .collect();
    let slots = if (experts + 1).is_multiple_of(5) {
        (1..=experts as u32).rev().collect()
    } else {
        slots
    };
    let arena = bench.poisoned((experts + 1) * tiles.bytes);
    for (record, slot) in records.iter().zip(&slots) {
        let mut tiled = vec![0; tiles.bytes];
        FragmentTiles.tile(&layout, record, &mut tiled);
        bench.write(arena.offset(*slot as usize * tiles.bytes), &tiled);
    }
    Layer {
        layout,
        tiles,
        records,
        arena,
        slots,
    }
}

impl Layer {
    fn weight(&self, expert: usize, matrix: ExpertMatrix, row: usize, column: usize) -> f64 {
        let (m, record) = (self.layout.matrix(matrix), &self.records[expert]);
        let half = |at: usize| f16::from_bits(u16::from_le_bytes([record[at], record[at + 1]])).to_f64();
        match self.layout.encoding {
            ExpertEncoding::F16 => half(m.values.start + (row * m.cols + column) * 2),
            ExpertEncoding::Qpacked { block } => {
                let code = record[m.values.start + (row * m.cols + column) / 2] >> (column % 2 * 4) & 15;
                let scale = row * m.cols.div_ceil(block.get()) + column / block.get();
                half(m.scales.start + scale * 2) * (f64::from(code) - 8.0)
            }
        }
    }

    fn dot(&self, expert: usize, matrix: ExpertMatrix, row: usize, x: &[f64]) -> (f64, f64) {
        let products = x
            .iter()
            .enumerate()
            .map(|(c, x)| self.weight(expert, matrix, row, c) * x);
        products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
    }

    /// An expert's output for one row, each with what it may be off by.
    fn expert(&self, expert: usize, x: &[f64]) -> Vec<(f64, f64)> {
        let inner: Vec<(f64, f64)> = (0..self.tiles.width)
            .map(|o| {
                let (gate, g) = self.dot(expert, ExpertMatrix::Gate, o, x);
                let (up, u) = self.dot(expert, ExpertMatrix::Up, o, x);
                let silu = gate / (1.0 + (-gate).exp());
                let sums = 1.1 * sum_error(x.len(), g) * up.abs() + sum_error(x.len(), u) * silu.abs();
                let want = silu * up;
                (
                    want,
                    want.abs() * (2f64.powi(-11) + 1e-6) + 2f64.powi(-25) + 2.0 * sums,
                )
            })
            .collect();
        let values: Vec<f64> = inner.iter().map(|v| v.0).collect();
        (0..self.tiles.hidden)
            .map(|o| {
                let (y, size) = self.dot(expert, ExpertMatrix::Down, o, &values);
                let spread: f64 = inner
                    .iter()
                    .enumerate()
                    .map(|(c, v)| self.weight(expert, ExpertMatrix::Down, o, c).abs() * v.1)
                    .sum();
                (y, spread + sum_error(values.len(), size))
            })
            .collect()
    }
}

/// What a step brings to the executor.
struct Step {
    groups: Groups,
    input: Vec<f16>,
    ids: Vec<u32>,
    weights: Vec<f32>,
    shared: Option<Vec<f32>>,
    gate: Option<Vec<f32>>,
    hidden: Vec<f32>,
}

impl Step {
    /// One row of it.
    fn row(&self, r: usize) -> Self {
        let (h, k) = (self.groups.hidden, self.groups.top_k);
        Self {
            groups: Groups {
                rows: 1,
                ..self.groups
            },
            input: self.input[r * h..][..h].to_vec(),
            ids: self.ids[r * k..][..k].to_vec(),
            weights: self.weights[r * k..][..k].to_vec(),
            shared: self.shared.as_ref().map(|v| v[r * h..][..h].to_vec()),
            gate: self.gate.as_ref().map(|v| vec![v[r]]),
            hidden: self.hidden[r * h..][..h].to_vec(),
        }
    }
}

/// How the experts of a step are spread.
#[derive(Clone, Copy, Debug)]
enum Spread {
    Random,
    /// Every row chooses the same experts, the last ones.
    Same,
    /// The last row alone chooses the first expert.
    Lone,
}

fn step(random: &mut Random, l: &Layer, rows: usize, top_k: usize, spread: Spread, shared: u32) -> Step {
    let (experts, hidden) = (l.slots.len(), l.tiles.hidden);
    let mut ids = Vec::new();
    for r in 0..rows {
        let first = match spread {
            Spread::Random => 0,
            Spread::Same => experts - top_k,
            Spread::Lone => usize::from(r + 1 < rows),
        };
        let mut left: Vec<u32> = (first as u32..experts as u32).collect();
        for k in 0..top_k {
            let lone = matches!(spread, Spread::Lone) && r + 1 == rows && k == 0;
            let at = if lone { 0 } else { random.below(left.len()) };
            ids.push(left.swap_remove(at));
        }
    }
    Step {
        groups: Groups {
            rows,
            top_k,
            experts,
            hidden,
            width: l.tiles.width,
            encoding: l.tiles.encoding,
        },
        input: random.halves(rows * hidden, 1.0),
        ids,
        weights: (0..rows * top_k).map(|_| random.real(0.5).abs() + 0.01).collect(),
        shared: (shared > 0).then(|| random.reals(rows * hidden, 1.0)),
        gate: (shared > 1).then(|| random.reals(rows, 1.0)),
        hidden: random.reals(rows * hidden, 1.0),
    }
}

/// What the executor leaves behind.
#[derive(Clone, Debug)]
struct Left {
    hidden: Vec<f32>,
    tap: Vec<f32>,
}

/// Runs a step in waves: `waves` gives, for each, which experts it has.
fn run(bench: &Bench, l: &Layer, s: &Step, form: GroupedForm, waves: &[Vec<bool>]) -> Left {
    let g = s.groups;
    let pairs = g.rows * g.top_k;
    let (ids, weights, input) = (
        bench.upload(&s.ids),
        bench.upload(&s.weights),
        bench.upload(&s.input),
    );
    let (order, count) = (bench.poisoned(pairs * 4), bench.poisoned(4));
    let work = bench.poisoned(g.work_tiles(form) * WORK_BYTES);
    let (inner, outputs) = (
        bench.poisoned(pairs * g.width * 2),
        bench.poisoned(pairs * g.hidden * 4),
    );
    let (hidden, tap) = (bench.upload(&s.hidden), bench.poisoned(s.hidden.len() * 4));
    let optional = |v: &Option<Vec<f32>>| v.as_ref().map_or(NULL, |v| bench.upload(v));
    let counters = bench.upload(&vec![0u32; g.counters()]);
    let index = GroupedIndexArgs {
        ids,
        order,
        work,
        count,
        rows: g.rows as u32,
        top_k: g.top_k as u32,
        experts: g.experts as u32,
        most: form.most(),
    };
    bench.launch(&g.index(), &index);
    let mut found: Vec<u32> = bench.read(order, pairs);
    let by_expert: Vec<u32> = found.iter().map(|p| s.ids[*p as usize]).collect();
    assert!(by_expert.is_sorted(), "pairs stand by expert");
    found.sort_unstable();
    assert!(
        found.iter().enumerate().all(|(i, p)| i == *p as usize),
        "every pair once"
    );
    let made: u32 = bench.read(count, 1)[0];
    let tiles: Vec<[u32; 4]> = bench.read(work, made as usize);
    assert!(
        tiles.is_sorted_by(|a, b| a[2].div_ceil(8) >= b[2].div_ceil(8)),
        "large work tiles come first"
    );
    let (shared, gate) = (optional(&s.shared), optional(&s.gate));
    for wave in waves {
        let slots: Vec<u32> = l
            .slots
            .iter()
            .zip(wave)
            .map(|(slot, there)| if *there { *slot } else { ABSENT })
            .collect();
        let args = GroupedArgs {
            experts: ExpertsArgs {
                arena: l.arena,
                slots: bench.upload(&slots),
                record_bytes: l.tiles.bytes as u64,
                down: l.tiles.pair_bytes as u64,
                ids,
                weights,
                input,
                inner,
                rows: g.rows as u32,
                hidden: g.hidden as u32,
                width: g.width as u32,
                top_k: g.top_k as u32,
                block: g.encoding.block() as u32,
                unused: 0,
            },
            order,
            work,
            count,
            outputs,
            shared,
            gate,
            hidden,
            tap,
            counters,
        };
        bench.launch(&g.gate_up(form), &args);
        bench.launch(&g.down(form), &args);
    }
    assert!(
        bench.read::<u32>(counters, g.counters()).iter().all(|c| *c == 0),
        "counters are ready for the next step"
    );
    Left {
        hidden: bench.read(hidden, s.hidden.len()),
        tap: bench.read(tap, s.hidden.len()),
    }
}

fn check(l: &Layer, s: &Step, got: &Left) {
    let (h, k) = (s.groups.hidden, s.groups.top_k);
    for r in 0..s.groups.rows {
        let x: Vec<f64> = s.input[r * h..][..h].iter().map(|v| v.to_f64()).collect();
        let mut want = vec![(0.0f64, 0.0f64, 0.0f64); h];
        for rank in 0..k {
            let w = f64::from(s.weights[r * k + rank]);
            for (sum, y) in want.iter_mut().zip(l.expert(s.ids[r * k + rank] as usize, &x)) {
                *sum = (sum.0 + w * y.0, sum.1 + w * y.1, sum.2 + (w * y.0).abs());
            }
        }
        for (o, (sum, off, size)) in want.into_iter().enumerate() {
            let gate = s.gate.as_ref().map_or(1.0, |g| f64::from(g[r]));
            let shared = s.shared.as_ref().map_or(0.0, |v| f64::from(v[r * h + o]) * gate);
            let what = format!("row {r}, output {o}");
            let tap = got.tap[r * h + o];
            close(
                &what,
                tap,
                sum + shared,
                off + sum_error(k + 1, size + shared.abs()),
            );
            assert_eq!(
                got.hidden[r * h + o],
                s.hidden[r * h + o] + tap,
                "{what}: the residual stream"
            );
        }
    }
}

fn encodings() -> Vec<ExpertEncoding> {
    let mut all: Vec<ExpertEncoding> = [BlockSize::B32, BlockSize::B64, BlockSize::B128, BlockSize::B256]
        .map(|block| ExpertEncoding::Qpacked { block })
        .to_vec();
    all.push(ExpertEncoding::F16);
    all
}

/// Every encoding in every form: right, and the same bits.
fn forms(bench: &Bench) {
    let mut random = Random::new(41);
    for (i, encoding) in encodings().into_iter().enumerate() {
        let shape = [(72, 40), (136, 328), (328, 24), (264, 136), (200, 72)][i];
        let l = layer(bench, &mut random, shape, 5, encoding);
        let s = step(&mut random, &l, 19, 3, Spread::Random, i as u32 % 3);
        let all = [vec![true; 5]];
        let mut first: Option<Left> = None;
        for form in GroupedForm::ALL {
            let got = run(bench, &l, &s, form, &all);
            check(&l, &s, &got);
            let want = first.get_or_insert_with(|| got.clone());
            assert_eq!(
                bits(&want.hidden),
                bits(&got.hidden),
                "{encoding:?}: {form:?} has other bits"
            );
        }
        let got = first.expect("three forms");
        for r in [0, 7, 18] {
            let own = run(bench, &l, &s.row(r), GroupedForm::Single, &all);
            assert_eq!(
                bits(&own.hidden),
                bits(&got.hidden[r * shape.0..][..shape.0]),
                "{encoding:?}, row {r} alone"
            );
        }
    }
}

/// All rows to the same experts, an expert with nobody, one with a single row, groups that need several work tiles.
fn spreads(bench: &Bench) {
    let mut random = Random::new(42);
    let encoding = ExpertEncoding::Qpacked {
        block: BlockSize::B32,
    };
    let l = layer(bench, &mut random, (40, 24), 6, encoding);
    for (rows, top_k, spread) in [
        (1, 1, Spread::Random),
        (64, 2, Spread::Same),
        (130, 3, Spread::Same),
        (70, 2, Spread::Lone),
        (9, 6, Spread::Random),
    ] {
        let s = step(&mut random, &l, rows, top_k, spread, 2);
        let form = if rows >= 64 {
            GroupedForm::Wide
        } else {
            s.groups.form()
        };
        let got = run(bench, &l, &s, form, &[vec![true; 6]]);
        check(&l, &s, &got);
    }
}

/// A group in two waves has the bits of one.
fn waves(bench: &Bench) {
    let mut random = Random::new(43);
    let encoding = ExpertEncoding::Qpacked {
        block: BlockSize::B64,
    };
    let l = layer(bench, &mut random, (72, 64), 7, encoding);
    let s = step(&mut random, &l, 12, 4, Spread::Random, 1);
    let once = run(bench, &l, &s, GroupedForm::Middle, &[vec![true; 7]]);
    let wave = |from, to| (0..7).map(|e| (from..to).contains(&e)).collect::<Vec<bool>>();
    let thrice = run(
        bench,
        &l,
        &s,
        GroupedForm::Single,
        &[wave(4, 7), wave(0, 1), wave(1, 4)],
    );
    assert_eq!(bits(&once.hidden), bits(&thrice.hidden));
    assert_eq!(bits(&once.tap), bits(&thrice.tap));
}

/// Thousands of experts, more than the index has threads.
fn many_experts(bench: &Bench) {
    let mut random = Random::new(44);
    let l = layer(
        bench,
        &mut random,
        (8, 8),
        1500,
        ExpertEncoding::Qpacked {
            block: BlockSize::B256,
        },
    );
    let s = step(&mut random, &l, 10, 16, Spread::Random, 0);
    let got = run(bench, &l, &s, s.groups.form(), &[vec![true; 1500]]);
    check(&l, &s, &got);
}

mod tests {
    crate::on_devices! {
        forms, gpu_forms;
        spreads, gpu_spreads;
        waves, gpu_waves;
        many_experts, gpu_many_experts;
    }
}
