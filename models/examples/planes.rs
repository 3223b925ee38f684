//! Makes a `weights.planes.zst` from a safetensors file of BF16 tensors, or restores the safetensors file or a plain
//! compressed one.

use std::error::Error;
use std::process::ExitCode;

use horizon_models::demo::{decompress, restore_weights, split_planes};

/// Level 19 is where more effort no longer makes the file smaller.
const LEVEL: i32 = 19;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [direction, from, to] = &arguments[..] else {
        eprintln!("usage: planes squeeze model.safetensors weights.planes.zst");
        eprintln!("       planes restore weights.planes.zst model.safetensors");
        eprintln!("       planes unzstd  tokenizer.json.zst tokenizer.json");
        return ExitCode::from(2);
    };
    match convert(direction, from, to) {
        Ok(bytes) => {
            println!("{to}: {bytes} bytes");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{from}: {e}");
            ExitCode::FAILURE
        }
    }
}

fn convert(direction: &str, from: &str, to: &str) -> Result<usize, Box<dyn Error>> {
    let input = std::fs::read(from)?;
    let output = match direction {
        "squeeze" => zstd::bulk::compress(&split_planes(&input)?, LEVEL)?,
        "restore" => restore_weights(&input)?,
        "unzstd" => decompress(&input)?,
        other => return Err(format!("{other:?} is none of squeeze, restore, unzstd").into()),
    };
    std::fs::write(to, &output)?;
    Ok(output.len())
}
