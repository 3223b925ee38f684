//! Times, as bytes that must move a second and as fractions of the card's read bandwidth.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use horizon_core::backend::{CompiledModel, Phase, StepBatch, StepOutput, StepRow};
use horizon_core::conformance;
use horizon_core::dense::DenseFormat;
use horizon_core::provider::ExpertProvider;
use horizon_core::spec::{FeedForward, ModelSpec};
use horizon_core::stage::{Stage, TapData};
use horizon_kernels_cuda::args::ReadArgs;
use horizon_kernels_cuda::driver::{Driver, DriverError, Launch, SharedDriver, Stream};
use horizon_kernels_cuda::launches::{NamedLaunch, StepShape};
use horizon_kernels_cuda::{CudaModel, Executor};

use crate::models::Loaded;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Milliseconds of a graph of `launches`, the median of `times` replays.
fn graph_ms(
    driver: &dyn Driver,
    stream: Stream,
    launches: &[Launch],
    times: usize,
) -> Result<f64, DriverError> {
    let (from, to) = (driver.event()?, driver.event()?);
    // SAFETY: the launches are those of an open model, or of buffers that the caller owns.
    #[expect(unsafe_code, reason = "launches with raw addresses")]
    let graph = unsafe { driver.graph(stream, launches)? };
    let mut all = Vec::new();
    for _ in 0..times + 3 {
        driver.record(from, stream)?;
        // SAFETY: as above.
        #[expect(unsafe_code, reason = "launches with raw addresses")]
        unsafe {
            driver.launch_graph(stream, graph)?;
        }
        driver.record(to, stream)?;
        driver.synchronize(stream)?;
        all.push(f64::from(driver.elapsed_ms(from, to)?));
    }
    Ok(median(all.split_off(3)))
}

/// Bytes a second of a read-only reduction over 2 GiB.
pub fn read_bandwidth(driver: &SharedDriver) -> Result<f64, DriverError> {
    const BYTES: usize = 2 << 30;
    let stream = driver.stream()?;
    let kernel = driver.kernel("read_all")?;
    let (from, sum) = (
        driver.allocate(BYTES, "a measurement")?,
        driver.allocate(1 << 16, "a measurement")?,
    );
    let blocks = driver.info().multiprocessors * 4;
    let args = ReadArgs {
        from,
        sum,
        words: BYTES as u64 / 16,
    };
    let launch = Launch {
        kernel,
        grid: [blocks, 1, 1],
        threads: 512,
        shared: 16,
        args: bytemuck::bytes_of(&args).to_vec(),
        overlaps: false,
        cooperative: false,
    };
    let ms = graph_ms(driver.as_ref(), stream, &[launch], 20)?;
    driver.free(from);
    driver.free(sum);
    Ok(BYTES as f64 / ms * 1e3)
}

/// Bytes that each kernel of a one-row step must read, a layer on average; and of the whole step without KV.
fn bytes(spec: &ModelSpec, dense: DenseFormat) -> BTreeMap<&'static str, f64> {
    let weight = match dense {
        DenseFormat::F16 => 2.0,
        DenseFormat::Q8 => 1.0 + 2.0 / 32.0,
    };
    let (h, a) = (spec.hidden as f64, &spec.attention);
    let (q, kv) = ((a.heads * a.head_dim) as f64, (a.kv_heads * a.head_dim) as f64);
    let mut out = BTreeMap::new();
    out.insert("norm_linear", (q + 2.0 * kv) * h * weight);
    out.insert("head", spec.vocab as f64 * h * weight);
    let (mut project, mut experts) = (h * q * weight, 0.0);
    if let FeedForward::Moe(m) = &spec.layers[0].feed_forward {
        let columns = m.experts + usize::from(m.shared.as_ref().is_some_and(|s| s.gated));
        project += columns as f64 * h * 2.0;
        let blocks = |n: usize| n.div_ceil(256) as f64;
        let codes = 1.5 * h * m.width as f64;
        let scales = 2.0 * (2.0 * m.width as f64 * blocks(spec.hidden) + h * blocks(m.width));
        experts = m.top_k as f64 * (codes + scales);
        experts += m
            .shared
            .as_ref()
            .map_or(0.0, |s| 3.0 * s.width as f64 * h * weight);
    }
    out.insert("project", project);
    out.insert("top4_fused_v1", experts);
    let layers = spec.layers.len() as f64;
    let step = layers * (out["norm_linear"] + project + experts) + out["head"];
    out.insert("step", step);
    out.insert("persistent_v1", step);
    out
}

/// Runs `tokens` from position `start`; whether the last of them is to choose, and whether stages are kept.
fn step(
    model: &mut CudaModel,
    experts: &Arc<dyn ExpertProvider>,
    phase: Phase,
    tokens: &[u32],
    start: usize,
    choose: bool,
    taps: bool,
) -> Result<StepOutput, String> {
    let rows = tokens.iter().enumerate().map(|(i, token)| StepRow {
        token: *token,
        position: start + i,
        sequence: 0,
        logits: choose && i + 1 == tokens.len(),
    });
    let batch = StepBatch {
        rows: rows.collect(),
        taps,
        phase,
        tokens_only: true,
    };
    let ticket = model.enqueue(&batch, experts).map_err(|e| e.to_string())?;
    model.finish(ticket).map_err(|e| e.to_string())
}

fn decode(
    model: &mut CudaModel,
    experts: &Arc<dyn ExpertProvider>,
    start: usize,
    steps: usize,
) -> Result<f64, String> {
    let tokens = conformance::tokens(steps, model.shape().vocab, 3);
    let mut all = Vec::new();
    for (i, token) in tokens.iter().enumerate() {
        let started = Instant::now();
        step(model, experts, Phase::Decode, &[*token], start + i, true, false)?;
        all.push(started.elapsed().as_secs_f64() * 1e3);
    }
    Ok(median(all))
}

/// Runs random tokens until `to` positions are filled.
fn fill(
    model: &mut CudaModel,
    experts: &Arc<dyn ExpertProvider>,
    from: usize,
    to: usize,
) -> Result<(), String> {
    let tokens = conformance::tokens(to, model.shape().vocab, 5);
    let chunk = model.shape().regime.max_rows;
    for start in (from..to).step_by(chunk) {
        let part = &tokens[start..to.min(start + chunk)];
        step(model, experts, Phase::Prefill, part, start, false, false)?;
    }
    Ok(())
}

/// Share of a token's experts that the token before used too, averaged over layers: how far routing spreads.
fn repeats(model: &mut CudaModel, experts: &Arc<dyn ExpertProvider>, start: usize) -> Result<f64, String> {
    let tokens = conformance::tokens(16, model.shape().vocab, 4);
    let mut before: Vec<Vec<i32>> = Vec::new();
    let (mut same, mut all) = (0usize, 0usize);
    for (i, token) in tokens.iter().enumerate() {
        let out = step(model, experts, Phase::Decode, &[*token], start + i, false, true)?;
        let now: Vec<Vec<i32>> = out
            .taps
            .into_iter()
            .filter_map(|t| match (t.stage, t.data) {
                (Stage::TopkIndex(_), TapData::I32(ids)) => Some(ids),
                _ => None,
            })
            .collect();
        for (now, before) in now.iter().zip(&before) {
            same += now.iter().filter(|e| before.contains(e)).count();
            all += now.len();
        }
        before = now;
    }
    Ok(same as f64 / all as f64)
}

/// Prefill of 512 random tokens, in one step, and the time to the first token of a prompt of 32.
fn prefill(model: &mut CudaModel, experts: &Arc<dyn ExpertProvider>, name: &str) -> Result<(), String> {
    for count in [512usize, 128, 32] {
        let tokens = conformance::tokens(count, model.shape().vocab, 6);
        let mut all = Vec::new();
        for _ in 0..12 {
            let started = Instant::now();
            step(model, experts, Phase::Prefill, &tokens, 0, true, false)?;
            all.push(started.elapsed().as_secs_f64() * 1e3);
        }
        let ms = median(all.split_off(2));
        println!(
            "prefill of {count} ({name}): {ms:.3} ms = {:.0} tok/s",
            count as f64 / ms * 1e3
        );
    }
    let step = StepShape {
        rows: 512,
        wanted: 1,
        appended: true,
        taps: false,
        phase: Phase::Prefill,
    };
    let launches = model.launches(&step, &[511]);
    let mut names: Vec<&str> = launches.iter().map(|l| l.name).collect();
    names.sort_unstable();
    names.dedup();
    let driver = model.driver().clone();
    for name in names {
        let own: Vec<Launch> = launches
            .iter()
            .filter(|l| l.name == name)
            .map(|l| l.launch.clone())
            .collect();
        let count = own.len();
        let ms = graph_ms(driver.as_ref(), model.stream(), &own, 10).map_err(|e| e.to_string())?;
        println!("  {name:<32} x{count:<3} {:>8.2} us", ms * 1e3 / count as f64);
    }
    Ok(())
}

/// Where the time of the persistent kernel goes: medians over layers of the clocks of one multiprocessor.
fn profile(model: &mut CudaModel, driver: &SharedDriver, step: &StepShape) -> Result<(), String> {
    const PARTS: [&str; 5] = ["qkv", "attend", "project", "pairs", "down"];
    let text = |e: DriverError| e.to_string();
    let layers = model.shape().layers;
    let buffer = driver.allocate(layers * 80, "a measurement").map_err(text)?;
    model.profile = buffer;
    let launches: Vec<Launch> = model.launches(step, &[0]).into_iter().map(|l| l.launch).collect();
    model.profile = horizon_kernels_cuda::driver::DevicePtr(0);
    graph_ms(driver.as_ref(), model.stream(), &launches, 5).map_err(text)?;
    let mut clocks = vec![0u64; layers * 10];
    // SAFETY: the buffer is that long, and the stream is synchronized before the clocks are read.
    #[expect(unsafe_code, reason = "a copy between raw addresses")]
    unsafe {
        driver
            .copy_to_host(model.stream(), clocks.as_mut_ptr().cast(), buffer, layers * 80)
            .map_err(text)?;
    }
    driver.synchronize(model.stream()).map_err(text)?;
    driver.free(buffer);
    let mut line = String::from("  cycles a layer:");
    let of = |from: usize, to: usize| {
        let all = clocks
            .chunks_exact(10)
            .map(|l| (l[to] - l[from]) as f64)
            .collect();
        median(all)
    };
    for (i, part) in PARTS.iter().enumerate() {
        line += &format!(" {part} {:.0}", of(2 * i, 2 * i + 1));
        if i < 4 {
            line += &format!(" barrier {:.0}", of(2 * i + 1, 2 * i + 2));
        }
    }
    line += &format!(" all {:.0}", of(0, 9));
    println!("{line}");
    Ok(())
}

/// Times decoding after contexts of several lengths.
fn decode_at_positions(
    model: &mut CudaModel,
    experts: &Arc<dyn ExpertProvider>,
    loaded: &Loaded,
    ceiling: f64,
    steps: usize,
) -> Result<(), String> {
    let bytes = bytes(&loaded.spec, loaded.dense_format);
    let mut filled = 16;
    for position in [16, 128, 1024, 4096] {
        fill(model, experts, filled, position)?;
        filled = position + steps;
        let ms = decode(model, experts, position, steps)?;
        let kv = (loaded.spec.layers.len()
            * 2
            * loaded.spec.attention.kv_heads
            * loaded.spec.attention.head_dim
            * 2) as f64
            * (position + steps / 2) as f64;
        let floor = (bytes["step"] + kv) / ceiling * 1e3;
        println!(
            "decode at {position:>5}: {:.1} us = {:.0} tok/s; {:.1} % of the floor of {:.0} us with KV; {:.1} % without",
            ms * 1e3,
            1e3 / ms,
            floor / ms * 100.0,
            floor * 1e3,
            bytes["step"] / ceiling * 1e3 / ms * 100.0
        );
    }
    Ok(())
}

/// Times the launches of each kernel of a step.
fn each_kernel(
    driver: &dyn Driver,
    stream: Stream,
    launches: &[NamedLaunch],
    bytes: &BTreeMap<&'static str, f64>,
    ceiling: f64,
) -> Result<(), DriverError> {
    let mut names: Vec<&str> = launches.iter().map(|l| l.name).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let own: Vec<Launch> = launches
            .iter()
            .filter(|l| l.name == name)
            .map(|l| l.launch.clone())
            .collect();
        let count = own.len();
        let us = graph_ms(driver, stream, &own, 30)? * 1e3 / count as f64;
        let known = bytes.iter().find(|(k, _)| name.starts_with(*k));
        match known {
            Some((_, b)) => println!(
                "  {name:<26} x{count:<3} {us:>7.2} us  {:>6.1} MB {:>6.0} GB/s {:>5.1} %",
                b / 1e6,
                b / us / 1e3,
                b / us * 1e6 / ceiling * 100.0
            ),
            None => println!("  {name:<26} x{count:<3} {us:>7.2} us"),
        }
    }
    Ok(())
}

/// Times a model: each kernel, the step as a graph, and the step as a user meets it.
pub fn model(
    driver: &SharedDriver,
    loaded: &Loaded,
    executor: Executor,
    ceiling: f64,
    steps: &usize,
) -> Result<(), String> {
    let (mut model, experts) = loaded.open(driver, executor, 512)?;
    let bytes = bytes(&loaded.spec, loaded.dense_format);
    println!(
        "\n{}, dense {}, decode executor {}; {:.1} MB a token",
        loaded.title,
        loaded.dense_format.name(),
        executor.name(),
        bytes["step"] / 1e6
    );
    let stream = model.stream();
    let share = repeats(&mut model, &experts, 0)?;
    println!("experts that the token before used too: {:.1} %", share * 100.0);
    let text = |e: DriverError| e.to_string();
    let step = StepShape {
        rows: 1,
        wanted: 1,
        appended: false,
        taps: false,
        phase: Phase::Decode,
    };
    if executor == Executor::PersistentV1 {
        prefill(&mut model, &experts, "grouped-t3")?;
    }
    decode_at_positions(&mut model, &experts, loaded, ceiling, *steps)?;
    // The last step's position stays in place: the graph replays it.
    let launches = model.launches(&step, &[0]);
    let all: Vec<Launch> = launches.iter().map(|l| l.launch.clone()).collect();
    let ms = graph_ms(driver.as_ref(), stream, &all, 50).map_err(text)?;
    println!(
        "step as a graph at 4096: {:.1} us, {} launches",
        ms * 1e3,
        launches.len()
    );
    if executor == Executor::PersistentV1 {
        profile(&mut model, driver, &step)?;
    }
    each_kernel(driver.as_ref(), stream, &launches, &bytes, ceiling).map_err(text)
}
