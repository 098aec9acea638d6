//! Two programs exchange tensors by key. Here both are in one process, each with an endpoint of its
//! own; `pleach exchange` does the same between processes.
//!
//! `cargo run --example exchange`

use std::time::Duration;

use pleach::exchange::{Endpoint, EndpointOptions, Key};

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let sender = Endpoint::open(&EndpointOptions::from_env()?)?;
    let address = sender.address().to_string();
    let receiver = std::thread::spawn(move || receive(&address));
    // A tensor in lendable memory: the receiver reads it there.
    for step in 0..3 {
        let mut tensor = sender.tensor::<f32>(&[256, 256])?;
        tensor.fill(step as f32);
        sender.send(&Key::new(step, "w0")?, tensor.share())?;
    }
    receiver.join().expect("the receiver returns its errors")
}

fn receive(address: &str) -> Result<(), Failure> {
    let endpoint = Endpoint::open(&EndpointOptions::from_env()?)?;
    let sender = endpoint.connect(address)?.within(Duration::from_secs(30));
    for step in 0..3 {
        let tensor = sender.receive(&Key::new(step, "w0")?)?;
        let sum: f32 = tensor.as_slice::<f32>()?.iter().sum();
        println!("step {step}: {}, {}, sum {sum}", tensor.shape(), tensor.way());
    }
    Ok(())
}
