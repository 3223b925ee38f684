//! `horizon pack`.

use std::num::NonZeroUsize;

use horizon_core::qpacked::Quantizer;
use horizon_models::pack::{
    DEFAULT_BLOCK, DEFAULT_QUANTIZER, PackError, PackOptions, PackReport, pack as pack_model,
};

use super::model;
use crate::args::PackArgs;
use crate::interrupt::Work;
use crate::output::{CliError, Output, bytes, thousands};
use crate::resolve::ModelPlace;

/// Packs a checkpoint.
pub fn pack(args: PackArgs) -> Result<(), CliError> {
    let out = Output::new(args.out);
    let bar = out.progress();
    let source = model::open(&ModelPlace::of(Some(&args.source)), &bar)?;
    let options = PackOptions {
        block: args.packing.block.unwrap_or(DEFAULT_BLOCK),
        quantizer: args.packing.quantizer.map_or(DEFAULT_QUANTIZER, Quantizer::from),
        force: args.force,
        threads: args.threads.map(NonZeroUsize::get),
    };
    let work = Work::begin();
    let packed = pack_model(&source, &args.output, &options, &bar, work.cancel());
    drop(work);
    bar.finish();
    let report = match packed {
        Err(PackError::Cancelled) => return Err(CliError::Interrupted),
        other => other?,
    };
    out.result(&report, || text(&args, &report))
}

fn text(args: &PackArgs, report: &PackReport) -> String {
    let PackReport {
        bytes_read,
        bytes_written,
        seconds,
        shards,
        block,
        ..
    } = report;
    let rate = bytes((*bytes_read as f64 / seconds) as u64);
    let lossy = |l: &horizon_core::artifact::manifest::LayerError| l.relative_rmse();
    let errors: Vec<f64> = report.quantization_error.iter().map(lossy).collect();
    let mean = errors.iter().sum::<f64>() / errors.len().max(1) as f64;
    let rounded = match report.narrowing.inexact {
        0 => String::new(),
        n => format!(
            "non-routed weights F16, {} of {} rounded to fit\n",
            thousands(n),
            thousands(report.narrowing.values)
        ),
    };
    format!(
        "{}: {} read, {} written in {shards} shards, {seconds:.1} s ({rate}/s)\n\
         experts INT4 ({}, block {block}), mean relative error {:.2} %\n{rounded}sha256 {}\n",
        args.output.display(),
        bytes(*bytes_read),
        bytes(*bytes_written),
        match report.quantizer {
            Quantizer::Absmax => "absmax",
            Quantizer::Mse => "mse",
        },
        mean * 100.0,
        report.manifest_sha256
    )
}
