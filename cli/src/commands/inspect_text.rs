//! The text of `horizon inspect`.

use std::fmt::Write;

use horizon_core::dense::DenseFormat;
use horizon_core::dtype::DType;
use horizon_core::qpacked::Quantizer;
use horizon_core::spec::{FeedForward, ModelSpec, QkNorm};
use horizon_runtime::engine::ExpertsRecord;

use super::inspect::Inspection;
use crate::output::{bytes, table, thousands};

/// Rows of the table of capacities, beside its first and last.
const STEPS: usize = 8;

/// Everything, for people.
pub fn text(i: &Inspection) -> String {
    let mut out = format!("{} ({})\n", i.model.place.display(), i.model.kind);
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "  {name:<16} {value}");
    };
    line("family", i.model.family.clone());
    line("sha256", i.model.sha256.clone());
    line(
        "parameters",
        format!(
            "{}, of which a token passes {}",
            thousands(i.parameters.total),
            thousands(i.parameters.active)
        ),
    );
    model_lines(&i.spec, &mut line);
    let d = &i.dtypes;
    line("checkpoint", types(&d.checkpoint));
    line("quantized source", types(&d.quantized_source));
    line("scale", d.scale.to_string());
    line("activation", d.activation.to_string());
    line("accumulation", d.accumulation.to_string());
    line(
        "non-routed",
        match i.dense {
            DenseFormat::F16 => d.non_routed_execution.to_string(),
            DenseFormat::Q8 => format!("{}, matrices q8 from the load on", d.non_routed_execution),
        },
    );
    line("experts", experts(&i.experts));
    if let (Some(record), Some(payload)) = (i.sizes.record_bytes, i.sizes.record_payload_bytes) {
        line(
            "expert record",
            format!(
                "{} bytes ({} without alignment)",
                thousands(record as u64),
                thousands(payload as u64)
            ),
        );
    }
    line(
        "weight files",
        format!("{} in {}", bytes(i.sizes.file_bytes), i.sizes.files),
    );
    let b = &i.bytes_per_token;
    line(
        "bytes a token",
        format!(
            "{}: non-routed {}, output head {}, routed {}",
            bytes(b.total),
            bytes(b.dense),
            bytes(b.head),
            bytes(b.routed)
        ),
    );
    errors(i, &mut out);
    memory(i, &mut out);
    for note in &i.notes {
        let _ = writeln!(out, "note: {note}");
    }
    if let Some(v) = &i.verified {
        let _ = writeln!(
            out,
            "verified: {} files, {} tensors, {} hashed",
            v.files,
            v.tensors,
            bytes(v.bytes)
        );
    }
    out
}

fn model_lines(spec: &ModelSpec, line: &mut impl FnMut(&str, String)) {
    let a = &spec.attention;
    let tied = if spec.tied_embeddings {
        ", output head tied"
    } else {
        ""
    };
    line(
        "layers",
        format!(
            "{}, hidden {}, vocabulary {}, context {}{tied}",
            spec.layers.len(),
            spec.hidden,
            spec.vocab,
            spec.context
        ),
    );
    let mut attention = format!(
        "{} heads, {} for keys and values, width {}",
        a.heads, a.kv_heads, a.head_dim
    );
    match a.qk_norm {
        QkNorm::None => {}
        QkNorm::AllHeads => attention.push_str(", q/k norm over all heads"),
        QkNorm::PerHead => attention.push_str(", q/k norm per head"),
    }
    if a.qkv_bias {
        attention.push_str(", q/k/v bias");
    }
    if let Some(clip) = a.clip_qkv {
        let _ = write!(attention, ", clipped at {clip}");
    }
    let _ = write!(attention, ", rope theta {}", a.rope_theta);
    line("attention", attention);
    let Some(moe) = spec.moe() else { return };
    let dense = spec
        .layers
        .iter()
        .filter(|l| matches!(l.feed_forward, FeedForward::Dense { .. }))
        .count();
    let mut routed = format!(
        "{} in each of {} layers, {} a token, width {}",
        moe.experts,
        spec.moe_layers().count(),
        moe.top_k,
        moe.width
    );
    if moe.renormalize {
        routed.push_str(", weights renormalised");
    }
    if dense > 0 {
        let _ = write!(routed, "; {dense} dense layers");
    }
    line("routed experts", routed);
    if let Some(s) = &moe.shared {
        line(
            "shared expert",
            format!("width {}{}", s.width, if s.gated { ", gated" } else { "" }),
        );
    }
}

fn types(list: &[DType]) -> String {
    let names: Vec<String> = list.iter().map(ToString::to_string).collect();
    if names.is_empty() {
        "-".into()
    } else {
        names.join(", ")
    }
}

fn experts(e: &ExpertsRecord) -> String {
    let method = e.quantizer.map(|q| match q {
        Quantizer::Absmax => "absmax",
        Quantizer::Mse => "mse",
    });
    match (e.block, method) {
        (Some(block), Some(method)) => format!("INT4, {} v1, {method}, block {block}", e.encoding),
        _ => "F16, unquantized".into(),
    }
}

fn errors(i: &Inspection, out: &mut String) {
    match &i.quantization_error {
        Some(layers) if !layers.is_empty() => {
            out.push_str("quantization error by layer (relative RMSE)\n");
            let cell = |l: &super::inspect::LayerLoss| {
                format!("{:>4}: {:5.2} %", l.layer.0, l.relative_rmse * 100.0)
            };
            for row in layers.chunks(6) {
                let _ = writeln!(out, " {}", row.iter().map(cell).collect::<Vec<_>>().join(" "));
            }
        }
        Some(_) => {}
        None if i.experts.block.is_some() => {
            out.push_str(
                "quantization error: not measured; --measure quantizes the checkpoint in memory to tell\n",
            );
        }
        None => {}
    }
}

fn memory(i: &Inspection, out: &mut String) {
    let m = &i.host_memory;
    let mut parts = vec![
        format!("routed experts {}", bytes(m.weights.experts)),
        format!("non-routed {}", bytes(m.weights.dense)),
    ];
    parts.extend(m.plan.iter().map(|(what, b)| format!("{what} {}", bytes(*b))));
    let _ = writeln!(
        out,
        "host memory with a context of {}: {}\n  {}; while loading also {}",
        i.gpu_memory.context,
        bytes(m.total),
        parts.join(", "),
        bytes(m.weights.scratch)
    );
    let rows = &i.gpu_memory.capacities;
    if rows.is_empty() {
        return;
    }
    let head = ["capacity", "total", "non-routed", "KV cache", "slots", "spares"].map(str::to_owned);
    let mut cells = vec![head.to_vec()];
    let step = rows.len().div_ceil(STEPS);
    let shown = rows
        .iter()
        .enumerate()
        .filter(|(n, _)| n % step == 0 || *n + 1 == rows.len());
    cells.extend(shown.map(|(_, r)| {
        vec![
            format!("c{}/{}", r.capacity, rows[rows.len() - 1].capacity),
            bytes(r.total),
            bytes(r.dense),
            bytes(r.kv),
            bytes(r.slots),
            bytes(r.spares),
        ]
    }));
    let _ = writeln!(
        out,
        "GPU memory by capacity, context {}, FP16 KV cache (not included: {})",
        i.gpu_memory.context, i.gpu_memory.not_included
    );
    out.push_str(&table(&cells));
    let _ = writeln!(
        out,
        "  beside it, pinned host memory for staging: at least {}",
        bytes(i.gpu_memory.least_staging_bytes as u64)
    );
}
