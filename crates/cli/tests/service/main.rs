//! `vellum daemon` as a service: a configuration that is read again, what systemd is told, sockets
//! that it hands over.

mod config;
mod place;
mod systemd;
