-- What the tasks of a step have used, counted by the srun that reaped them; null where nobody did.
ALTER TABLE steps ADD COLUMN user_cpu_s REAL CHECK (user_cpu_s >= 0);
ALTER TABLE steps ADD COLUMN system_cpu_s REAL CHECK (system_cpu_s >= 0);
ALTER TABLE steps ADD COLUMN peak_mem_mib REAL CHECK (peak_mem_mib >= 0);
ALTER TABLE steps ADD COLUMN mean_mem_mib REAL CHECK (mean_mem_mib >= 0);
-- The part of cpu_s that the kernel spent for the run.
ALTER TABLE runs ADD COLUMN system_cpu_s REAL;
