//! `pleach bench --memory cuda`, real processes with a fake driver everywhere, and with a real one
//! where there is a GPU: `cargo test --test gpu_memory -- --ignored gpu::`.

#[path = "../transport/tests/fake_cuda/mod.rs"]
mod fake_cuda;
#[allow(dead_code)] // Not every test looks at processes.
mod launcher;
mod skipped;

use std::process::Output;
use std::time::Duration;

use launcher::{finish, pleach};
use pleach::exchange::{Endpoint, EndpointOptions, ExchangeFabric, Key, TensorWay};
use pleach::{Collective, Gpu, GpuBuffer};
use skipped::skip;

fn bench(is_fake: bool, environment: &[(&str, &str)], arguments: &str) -> Output {
    let mut command = pleach();
    if is_fake {
        command.env("LD_LIBRARY_PATH", fake_cuda::folder());
    }
    command.envs(environment.iter().copied()).arg("bench").args(arguments.split_whitespace());
    finish(command)
}

fn expect_right(output: &Output, what: &str) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (rows, said) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{what}: {rows}{said}");
    let rows: Vec<_> = rows.lines().filter(|line| line.starts_with('{')).collect();
    assert!(!rows.is_empty() && rows.iter().all(|row| row.contains("\"errors\":0}")), "{what}: {rows:?}");
}

/// The last line that a command said when it failed.
fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty(), "results only on standard output");
    String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned()
}

fn every_collective_is_right(is_fake: bool) {
    for fabric in ["tcp", "shm"] {
        for collective in Collective::NAMES {
            let sizes = if collective == "barrier" { "" } else { "--sizes 8,5000,400000" };
            let arguments = format!(
                "{collective} --memory cuda --fabric {fabric} --ranks 2 {sizes} --warmup 1 --iterations 2 --json"
            );
            expect_right(&bench(is_fake, &[], &arguments), &arguments);
        }
    }
}

#[test]
fn every_collective_on_gpu_memory_is_right_over_tcp_and_shm() {
    every_collective_is_right(true);
}

#[test]
fn ranks_take_turns_with_the_gpus_that_there_are() {
    let arguments = "all-reduce --memory cuda --fabric tcp --ranks 3 --sizes 5000 --dtype bf16 --op avg --iterations 2 --json";
    expect_right(&bench(true, &[("FAKE_CUDA_GPUS", "2")], arguments), arguments);
    let arguments =
        "all-reduce --memory cuda:1 --fabric shm --ranks 2 --sizes 5000 --iterations 2 --reuse --json";
    expect_right(&bench(true, &[("FAKE_CUDA_GPUS", "2")], arguments), arguments);
}

#[test]
fn what_keeps_a_gpu_from_being_used_is_said_once_and_before_ranks_are_started() {
    let said = complaint(&bench(true, &[], "all-reduce --memory cuda:3 --ranks 2"));
    assert!(said.starts_with("error: no GPU memory: there is no GPU 3: the CUDA driver shows 1"), "{said}");
    let said = complaint(&bench(true, &[("FAKE_CUDA_GPUS", "0")], "all-reduce --memory cuda --ranks 2"));
    assert!(said.contains("there is no GPU 0: the CUDA driver shows 0"), "{said}");
    let said =
        complaint(&bench(true, &[("FAKE_CUDA_VERSION", "11040")], "all-reduce --memory cuda --ranks 2"));
    assert!(said.contains("install one for CUDA 12.0 or newer"), "{said}");
}

#[test]
fn a_machine_without_a_driver_says_what_is_missing() {
    // This process itself must not look for a driver: it looks once, and another test of it loads
    // the fake one.
    let arguments = "all-reduce --memory cuda --fabric tcp --ranks 2 --sizes 8 --warmup 1 --iterations 2";
    let output = bench(false, &[], arguments);
    let has_driver =
        output.status.success() || String::from_utf8_lossy(&output.stderr).contains("the CUDA driver shows");
    if has_driver {
        return skip("this machine has a CUDA driver");
    }
    let said = complaint(&output);
    assert!(said.starts_with("error: no GPU memory: no CUDA driver is here"), "{said}");
    assert!(said.ends_with("or use host memory"), "{said}");
}

mod gpu {
    #[test]
    #[ignore = "needs an NVIDIA GPU: where there is one, run it with --ignored gpu::"]
    fn every_collective_on_gpu_memory_is_right_over_tcp_and_shm() {
        super::every_collective_is_right(false);
    }
}

/// A tensor goes from one GPU buffer to another one of another endpoint.
fn exchanged(gpu: &std::sync::Arc<Gpu>, fabric: ExchangeFabric, way: TensorWay) {
    let limit = Duration::from_secs(60);
    let mut options = EndpointOptions::default();
    options.fabric = fabric;
    options.requires_regions = true;
    let open = || Endpoint::open(&options).expect("a free port of loopback");
    let (sender, receiver, key) = (open(), open(), Key::new(1, "w").expect("a good name"));
    let values: Vec<f32> = (0..5_000).map(|value| value as f32).collect();
    let mut from = GpuBuffer::<f32>::new(gpu, values.len()).expect("there is memory");
    from.store(&values).expect("the GPU copies");
    let mut tensor = sender.tensor::<f32>(&[values.len()]).expect("there is memory");
    from.load(&mut tensor).expect("the GPU copies");
    sender.send(&key, tensor.share()).expect("there is room");
    // What is written there afterwards is not sent.
    from.store(&vec![0.0; values.len()]).expect("the GPU copies");

    let mut into = GpuBuffer::<f32>::new(gpu, values.len()).expect("there is memory");
    let peer = receiver.connect(&sender.address().to_string()).expect("an address").within(limit);
    let received = peer.receive(&key).expect("was sent");
    assert_eq!(received.way(), way);
    into.store(received.as_slice().expect("numbers of this type")).expect("the GPU copies");
    drop(received);
    let mut seen = vec![0.0; values.len()];
    into.load(&mut seen).expect("the GPU copies");
    assert_eq!(seen, values);
}

#[test]
fn tensors_of_the_exchange_come_from_a_gpu_and_go_to_one() {
    fake_cuda::load();
    let gpu = Gpu::open(0).expect("the fake driver has a GPU");
    exchanged(&gpu, ExchangeFabric::Shm, TensorWay::InPlace);
    exchanged(&gpu, ExchangeFabric::Tcp, TensorWay::Copied);
}
